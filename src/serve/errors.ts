/** Errors of the HTTP interface, in the shape of OpenAI's. */

/** An error with its HTTP status. The message is written for the client. */
export class ApiError extends Error {
  readonly status: number;
  readonly type: string;
  readonly param: string | null;
  readonly code: string | null;
  readonly headers: Readonly<Record<string, string>>;

  constructor(
    status: number,
    message: string,
    options: { param?: string; code?: string; type?: string; headers?: Readonly<Record<string, string>> } = {},
  ) {
    super(message);
    this.status = status;
    this.type = options.type ?? (status >= 500 ? 'server_error' : 'invalid_request_error');
    this.param = options.param ?? null;
    this.code = options.code ?? null;
    this.headers = options.headers ?? {};
  }

  get body(): object {
    return { error: { message: this.message, type: this.type, param: this.param, code: this.code } };
  }
}

/** The error that a client sees of anything thrown. The details of a defect go to the terminal, not to the client. */
export function asApiError(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  console.error(error);
  return new ApiError(500, 'the server failed to answer this request');
}
