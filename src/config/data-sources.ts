/**
 * The names of `data.source`, and what the sources have. A new source is added here and opened in
 * src/data/pipeline/numbered-source.ts.
 */

/** Every source. */
export const DATA_SOURCES = [
  'synthetic',
  'needle',
  'stories',
  'text',
  'jsonl',
  'fineweb_edu',
  'fineweb_edu_local',
  'tokens',
  'chat',
] as const;

export type DataSourceName = (typeof DATA_SOURCES)[number];

/** Sources that read `data.path`. All others make their data or know its address. */
export const PATH_SOURCES = ['text', 'jsonl', 'fineweb_edu_local', 'tokens', 'chat'] as const;

/** Sources that can read validation documents from `data.val_path`. */
export const VALIDATION_PATH_SOURCES = ['text', 'jsonl', 'tokens'] as const;

/** Sources that consist of text documents. */
export const DOCUMENT_SOURCES = ['text', 'jsonl', 'fineweb_edu', 'fineweb_edu_local'] as const;

/** Sources whose documents are tokenised while training runs. */
export const STREAMED_SOURCES = ['fineweb_edu', 'fineweb_edu_local'] as const;

/** Whether `source` is one of `names`; narrows its type. */
export function isOneOf<Name extends string>(names: readonly Name[], source: unknown): source is Name {
  return (names as readonly unknown[]).includes(source);
}
