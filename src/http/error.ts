/** Errors that become answers with a status. */

/** Fields of an error in the shape of OpenAI's besides the message. */
export interface ErrorDetail {
  readonly param?: string;
  readonly code?: string;
  readonly type?: string;
  /** Headers of the answer. */
  readonly headers?: Readonly<Record<string, string>>;
}

/** An answer other than success. The message is written for the client. */
export class HttpError extends Error {
  readonly status: number;
  readonly detail: ErrorDetail;

  constructor(status: number, message: string, detail: ErrorDetail = {}) {
    super(message);
    this.status = status;
    this.detail = detail;
  }

  /** Its code, or its type where it has none. */
  get code(): string {
    return this.detail.code ?? this.#type;
  }

  get #type(): string {
    return this.detail.type ?? (this.status >= 500 ? 'server_error' : 'invalid_request_error');
  }

  /** The JSON value of the answer in the shape of OpenAI's. */
  get body(): object {
    const { param = null, code = null } = this.detail;
    return { error: { message: this.message, type: this.#type, param, code } };
  }
}

/** The refusal of a server that has too much to do: the client may try again after some seconds. */
export function tooBusy(message: string, code: string, seconds = 5): HttpError {
  return new HttpError(429, message, { type: 'rate_limit_error', code, headers: { 'retry-after': String(seconds) } });
}

/** The error that a client sees of anything thrown. The details of a defect go to the terminal, not to the client. */
export function asHttpError(error: unknown): HttpError {
  if (error instanceof HttpError) return error;
  console.error(error);
  return new HttpError(500, 'the server failed to answer this request; its terminal shows why');
}
