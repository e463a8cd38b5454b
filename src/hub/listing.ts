/** The commit of a revision of a repository, and its files. `api` is its address, such as https://host/api/models/owner/name. */
import * as z from '../zod.js';
import { describeUrl, fetchSmall, type HttpOptions, SourceGaveUp } from './http.js';

/** The largest datasets have a hundred thousand files, in pages of a thousand. */
const MAX_PAGES = 1000;
const MAX_ENTRIES = 1_000_000;

const Revision = z.looseObject({ sha: z.string().regex(/^[0-9a-f]{7,64}$/) });
const Tree = z.array(
  z.looseObject({
    type: z.string(),
    path: z.string(),
    size: z.number().int().min(0).optional(),
    oid: z.string().optional(),
    lfs: z.looseObject({ oid: z.string(), size: z.number().int().min(0) }).optional(),
  }),
);

/** A file or folder. `oid` is its name in git; `lfs.oid` the SHA-256 of a file that git does not hold itself. */
export type TreeEntry = z.infer<typeof Tree>[number];

/** The commit that a branch, tag or commit stands for; undefined if there is none, or no such repository. */
export async function fetchCommit(api: string, revision: string, http: HttpOptions): Promise<string | undefined> {
  const found = await fetchSmall(`${api}/revision/${encodeURIComponent(revision)}`, http);
  return found === undefined ? undefined : parseAnswer(api, found.text, Revision).sha;
}

/** All files and folders of a commit. */
export async function listTree(api: string, commit: string, http: HttpOptions): Promise<TreeEntry[]> {
  const first = `${api}/tree/${commit}?recursive=true`;
  const entries: TreeEntry[] = [];
  const seen = new Set<string>();
  for (let url: string | undefined = first; url !== undefined; ) {
    if (seen.has(url))
      throw new SourceGaveUp(`${describeUrl(first)}: its listing leads back to a page of its own; refused`);
    seen.add(url);
    const page = await fetchSmall(url, http);
    if (page === undefined) throw new SourceGaveUp(`${describeUrl(url)}: the listing is gone (HTTP 404)`);
    for (const entry of parseAnswer(url, page.text, Tree)) entries.push(entry); // one page may list a million
    if (seen.size > MAX_PAGES || entries.length > MAX_ENTRIES)
      throw new SourceGaveUp(
        `${describeUrl(first)}: a listing of more than ${MAX_PAGES} pages or ${MAX_ENTRIES} files; refused`,
      );
    const next: string | undefined = /<([^>]+)>;\s*rel="next"/.exec(page.headers.get('link') ?? '')?.[1];
    // The token must not be sent to a host that the listing names.
    if (next !== undefined && new URL(next, url).origin !== new URL(first).origin)
      throw new SourceGaveUp(`${describeUrl(first)}: its listing leads to another host; refused`);
    url = next === undefined ? undefined : new URL(next, url).href;
  }
  return entries;
}

export function parseAnswer<Value>(url: string, text: string, schema: z.ZodType<Value>): Value {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SourceGaveUp(`${describeUrl(url)}: the answer is not JSON; is HF_ENDPOINT a hub?`, { cause: error });
  }
  const parsed = schema.safeParse(value);
  if (parsed.success) return parsed.data;
  throw new SourceGaveUp(`${describeUrl(url)}: not the answer of a hub (${parsed.error.issues[0].message})`);
}
