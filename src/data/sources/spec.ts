/** A corpus as plain data. Worker threads receive it by message and open the files themselves. */

import type { HttpOptions } from '../../hub/http.js';
import type { SkippedFile } from './files.js';

/** The format of a file. */
export type FileKind = 'parquet' | 'jsonl' | 'text';

export interface CorpusFile {
  readonly kind: FileKind;
  /** Path inside the folder or the dataset, for messages and the identity. Never an absolute path. */
  readonly name: string;
  /** A path or a URL. */
  readonly location: string;
  readonly size: number;
  /** Equal for equal content, as far as metadata shows. */
  readonly identity: string;
  /** Time of change of a local file, in nanoseconds. Not part of the identity. */
  readonly modified?: string;
  /** Parts that can be read independently; 1 for a file that can only be read from its start. */
  readonly parts: number;
}

export interface CorpusSpec {
  readonly files: readonly CorpusFile[];
  /** Files found beside them that are not read. */
  readonly skipped: readonly SkippedFile[];
  /** Field of a JSONL row, column of a Parquet file; dots lead into structs. */
  readonly textField: string;
  /** For remote files. */
  readonly http?: HttpOptions | undefined;
  readonly cache?: { readonly folder: string; readonly limitBytes: number } | undefined;
  /** Number of lanes. Part of the order, so it must not depend on the machine. */
  readonly lanes: number;
  readonly shuffle: boolean;
  readonly seed: number;
  /** Chooses the validation documents. */
  readonly splitSeed: number;
  readonly valFraction: number;
}
