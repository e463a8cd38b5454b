/** Lists the Parquet files of a dataset on the Hugging Face hub or a mirror of it. */

import { createHash } from 'node:crypto';
import { parse as parseYaml } from 'yaml';
import { yamlRefusal } from '../../config/yaml-shape.js';
import { UsageError } from '../../errors.js';
import type { HubAccess } from '../../hub/access.js';
import { describeUrl, fetchSize, fetchSmall, type HttpOptions, SourceGaveUp, withDeadline } from '../../hub/http.js';
import { fetchCommit, listTree, parseAnswer } from '../../hub/listing.js';
import * as z from '../../zod.js';

/** A card of the hub has some thousand bytes of YAML. */
const MAX_CARD = 2 ** 18;
const MAX_PATTERN = 1000;
/** A card may have thousands of patterns for a hundred thousand files. */
const MAX_MATCHING_MS = 20_000;
/** Converted datasets: each file is asked for its size. */
const MAX_CONVERTED = 20_000;

export interface HubRequest {
  /** owner/name */
  readonly dataset: string;
  /** Null selects the dataset's default configuration. */
  readonly configuration: string | null;
  readonly split: string;
  readonly revision: string;
}

export interface HubFile {
  readonly name: string;
  readonly url: string;
  readonly size: number;
  /** Equal for equal content. */
  readonly identity: string;
}

const Urls = z.array(z.string().regex(/^https?:\/\//));

const Paths = z.union([z.string(), z.array(z.string())]);
const Card = z.looseObject({
  configs: z
    .array(
      z.looseObject({
        config_name: z.string(),
        default: z.boolean().optional(),
        data_dir: z.string().optional(),
        data_files: z
          .union([Paths, z.array(z.looseObject({ split: z.string(), path: Paths })), z.record(z.string(), Paths)])
          .optional(),
      }),
    )
    .optional(),
});
type CardConfig = NonNullable<z.infer<typeof Card>['configs']>[number];

/** Lists the files, pinned to one commit, in the order of their names. */
export async function listDataset(request: HubRequest, access: HubAccess, options: HttpOptions): Promise<HubFile[]> {
  const http = withDeadline(options);
  const { dataset, split } = request;
  if (!/^[\w.-]+\/[\w.-]+$/.test(dataset))
    throw new UsageError(`data.hub_dataset: ${dataset} is not of the form owner/name`);
  const api = `${access.endpoint}/api/datasets/${dataset}`;
  const sha = await fetchCommit(api, request.revision, http);
  if (sha === undefined)
    throw new UsageError(
      `data.hub_dataset: ${describeUrl(access.endpoint)} has no dataset ${dataset} with revision ${request.revision}`,
    );
  const base = `${access.endpoint}/datasets/${dataset}/resolve/${sha}`;
  const card = await fetchSmall(`${base}/README.md`, http);
  const configs = card === undefined ? [] : cardConfigs(card.text);
  const chosen = chooseConfig(configs, request);
  const tree = await listTree(api, sha, http);
  const patterns = chosen === undefined ? undefined : patternsOf(chosen, split);
  const isMatch = patterns && anyOf(patterns, dataset);
  const files = tree
    .filter(({ type, path }) => type === 'file' && path.endsWith('.parquet'))
    .filter(({ path }) => (isMatch === undefined ? inFolder(path, request.configuration) : isMatch(path)))
    .map((entry) => ({
      name: entry.path,
      url: `${base}/${entry.path.split('/').map(encodeURIComponent).join('/')}`,
      size: entry.lfs?.size ?? entry.size ?? 0,
      identity: entry.lfs?.oid ?? entry.oid ?? `${sha}/${entry.path}`,
    }));
  if (files.length > 0) return files.sort((a, b) => (a.name < b.name ? -1 : 1));
  return listConverted(api, request, chosen?.config_name, http);
}

/** Datasets in other formats: the hub keeps Parquet copies of them. */
async function listConverted(
  api: string,
  { dataset, configuration, split }: HubRequest,
  chosen: string | undefined,
  http: HttpOptions,
): Promise<HubFile[]> {
  const name = configuration ?? chosen ?? 'default';
  const answer = await fetchSmall(`${api}/parquet/${encodeURIComponent(name)}/${encodeURIComponent(split)}`, http);
  const urls = answer === undefined ? [] : parseAnswer(api, answer.text, Urls);
  if (urls.length === 0)
    throw new UsageError(
      `data.hub_config: ${dataset} has no Parquet files for configuration ${name}, split ${split}; ` +
        'check data.hub_config and data.hub_split',
    );
  if (urls.length > MAX_CONVERTED)
    throw new SourceGaveUp(`${describeUrl(api)}: a listing of more than ${MAX_CONVERTED} files; refused`);
  const sizes = await Promise.all(urls.map((url) => fetchSize(url, http)));
  return urls.map((url, index) => ({
    name: new URL(url).pathname,
    url,
    size: sizes[index],
    identity: createHash('sha256').update(`${url} ${sizes[index]}`).digest('hex'),
  }));
}

/** The configurations in the YAML head of a dataset's README. */
function cardConfigs(readme: string): CardConfig[] {
  const head = /^---\r?\n([\s\S]*?)\r?\n---/.exec(readme)?.[1];
  if (head === undefined) return [];
  if (head.length > MAX_CARD) throw new SourceGaveUp(`the card of the dataset has ${head.length} characters; refused`);
  if (yamlRefusal(head) !== null) return [];
  try {
    // Without aliases, a text of this size cannot become a larger tree.
    return (
      Card.parse(parseYaml(head, { logLevel: 'error', maxAliasCount: 0, uniqueKeys: false, prettyErrors: false }))
        .configs ?? []
    );
  } catch (error) {
    // Malformed parts of a card (licence, tags) are ignored. Without configs, folders are the configurations.
    const isMalformed = error instanceof ReferenceError || error instanceof RangeError; // aliases, depth
    if (isMalformed || error instanceof z.ZodError || (error as Error).name.startsWith('YAML')) return [];
    throw error;
  }
}

function chooseConfig(configs: readonly CardConfig[], { dataset, configuration }: HubRequest): CardConfig | undefined {
  if (configs.length === 0) return undefined;
  if (configuration === null)
    return (
      configs.find((config) => config.default) ??
      configs.find((config) => config.config_name === 'default') ??
      configs[0]
    );
  const chosen = configs.find((config) => config.config_name === configuration);
  if (chosen !== undefined) return chosen;
  const names = configs.slice(0, 12).map((config) => config.config_name);
  throw new UsageError(
    `data.hub_config: ${dataset} has no configuration ${configuration}; it has ${names.join(', ')}` +
      (configs.length > names.length ? ` and ${configs.length - names.length} more` : ''),
  );
}

function patternsOf({ config_name, data_dir, data_files }: CardConfig, split: string): PathTest[] {
  const folder = data_dir === undefined ? '' : `${data_dir.replace(/\/+$/, '')}/`;
  if (data_files === undefined) return [globPattern(`${folder || `${config_name}/`}**`)];
  const bySplit = new Map<string, string[]>();
  const add = (name: string, paths: string | string[]): void => {
    bySplit.set(name, [...(bySplit.get(name) ?? []), ...[paths].flat()]);
  };
  if (typeof data_files === 'string') add('train', data_files);
  else if (!Array.isArray(data_files)) for (const [name, paths] of Object.entries(data_files)) add(name, paths);
  else for (const entry of data_files) typeof entry === 'string' ? add('train', entry) : add(entry.split, entry.path);
  const paths = bySplit.get(split);
  if (paths === undefined)
    throw new UsageError(
      `data.hub_split: configuration ${config_name} has no split ${split}; it has ${[...bySplit.keys()].join(', ')}`,
    );
  return paths.map((path) => globPattern(`${folder}${path}`));
}

/** Whether a path matches one of the patterns. All paths together are matched within a time. */
export function anyOf(patterns: readonly PathTest[], dataset: string, limitMs = MAX_MATCHING_MS): PathTest {
  const started = performance.now();
  return (path) =>
    patterns.some((matches) => {
      if (performance.now() - started > limitMs)
        throw new SourceGaveUp(`the patterns in the card of ${dataset} take more than ${limitMs / 1000} s; refused`);
      return matches(path);
    });
}

/** Whether a path matches a pattern. */
type PathTest = (path: string) => boolean;

/**
 * `*` stays within a folder, `**` does not. Matched in time of pattern times path: the set of places in the pattern that the
 * path so far can have reached.
 */
export function globPattern(pattern: string): PathTest {
  if (pattern.length > MAX_PATTERN)
    throw new SourceGaveUp(`the card of the dataset has a pattern of ${pattern.length} characters; refused`);
  const parts = pattern.match(/\*\*+\/?|./gsu) ?? [];
  const isDeep = (part: string) => part.startsWith('**');
  /** Places that are reached without a character: wildcards may be empty. */
  const spread = (places: Set<number>): Set<number> => {
    for (const place of places) if (parts[place]?.startsWith('*')) places.add(place + 1);
    return places;
  };
  return (path) => {
    let places = spread(new Set([0]));
    for (const char of path) {
      const next = new Set<number>();
      for (const place of places) {
        const part = parts[place];
        if (part === undefined) continue;
        if (isDeep(part) || (part === '*' && char !== '/')) next.add(place);
        else if (part === char || (part === '?' && char !== '/')) next.add(place + 1);
      }
      places = spread(next);
    }
    return places.has(parts.length);
  };
}

/** Without a card a configuration is a folder, and the default is all files. */
function inFolder(path: string, configuration: string | null): boolean {
  return configuration === null || configuration === 'default' || path.split('/').includes(configuration);
}
