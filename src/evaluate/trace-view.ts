/** The JSON of a trace, as the reader view shows it. Types only: server and pages import this module. */

/** The text of a trace with its probabilities, and the shape of what was selected. */
export interface TraceText {
  readonly model: string;
  readonly step: number | null;
  readonly layers: number;
  readonly groups: number;
  readonly slots: number;
  /** Tokens per block. */
  readonly blockSize: number;
  /** Tokens that the window branch sees. */
  readonly window: number;
  readonly pieces: readonly string[];
  /** Log-probability of the token that followed each token; null for the last. */
  readonly logprobs: readonly (number | null)[];
  /** [layer][block]: how many (token, group) pairs selected the block. */
  readonly counts: readonly (readonly number[])[];
}

/** The blocks that one token read. */
export interface TraceToken {
  /** [layer][group]: blocks in ascending order. */
  readonly selected: readonly (readonly (readonly number[])[])[];
  /** [layer][group]: shares of the compressed, selected and window branch. */
  readonly gates: readonly (readonly (readonly number[])[])[];
}

/** Tokens that read a block, with the number of (layer, group) pairs that did. */
export interface TraceReaders {
  readonly readers: readonly (readonly [token: number, count: number])[];
}
