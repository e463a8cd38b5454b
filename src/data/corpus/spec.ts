/** What a streamed corpus is, as plain data: worker threads get it by message and open the files themselves. */

import type { HttpOptions } from '../hub/http.js';

/** How the documents of a file are found. */
export type FileKind = 'parquet' | 'jsonl' | 'text' | 'generated';

export interface CorpusFile {
  readonly kind: FileKind;
  /** For messages and for the identity: a path in the folder or the dataset, never one of this machine. */
  readonly name: string;
  /** A path or a URL. */
  readonly location: string;
  readonly size: number;
  /** Equal for equal content, as far as can be told without reading it. */
  readonly identity: string;
  /** A file may be read in so many parts, each by another lane; 1 where it can only be read from its start. */
  readonly parts: number;
}

export interface CorpusSpec {
  readonly files: readonly CorpusFile[];
  /** Field of a JSONL row, column of a Parquet file; dots lead into structs. */
  readonly textField: string;
  /** For remote files. */
  readonly http?: HttpOptions | undefined;
  readonly cache?: { readonly folder: string; readonly limitBytes: number } | undefined;
  /** Streams that are read side by side. Part of the order: it must not depend on the machine. */
  readonly lanes: number;
  readonly shuffle: boolean;
  readonly seed: number;
  readonly valFraction: number;
}
