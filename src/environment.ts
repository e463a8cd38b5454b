/** Environment variables by name; `process.env` is one. */
export type Environment = Readonly<Record<string, string | undefined>>;
