/**
 * The names of `data.source` and what the sources have. A new source is added here and opened in
 * src/data/pipeline/numbered-source.ts.
 */

/** Every source. */
export const DATA_SOURCES = [
  'synthetic',
  'needle',
  'stories',
  'text',
  'jsonl',
  'hub',
  'files',
  'tokens',
  'chat',
  'mixture',
] as const;

/** Sources that a mixture (data.sources) can have: samples of these are known by number. */
export const MIXED_SOURCES = ['text', 'jsonl', 'files', 'tokens', 'chat', 'synthetic', 'needle', 'stories'] as const;

/** Sources that read `data.path`. All others make their data or know its address. */
export const PATH_SOURCES = ['text', 'jsonl', 'files', 'tokens', 'chat'] as const;

/** Sources that can read validation documents from `data.val_path`. */
export const VALIDATION_PATH_SOURCES = ['text', 'jsonl', 'tokens'] as const;

/** Sources that consist of text documents. */
export const DOCUMENT_SOURCES = ['text', 'jsonl', 'hub', 'files'] as const;

/** Sources whose documents are tokenised while training runs. */
export const STREAMED_SOURCES = ['hub', 'files'] as const;

/** Whether `source` is one of `names`; narrows its type. */
export function isOneOf<Name extends string>(names: readonly Name[], source: unknown): source is Name {
  return (names as readonly unknown[]).includes(source);
}

export function readsPath(source: unknown): boolean {
  return isOneOf(PATH_SOURCES, source);
}

/** The message about a path that its source would ignore. */
export function ignoredPath(source: unknown, where?: string): string {
  return (
    `data.path: not read by data.source ${source}; leave data.source (--dataset) out, or set it to one of ` +
    `${PATH_SOURCES.join(', ')}${where === undefined ? '' : ` [${where}]`}`
  );
}
