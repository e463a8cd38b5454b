/** Names of models on the hub, as users write them: `hf:owner/name` or `hf:owner/name@revision`. */
import { UsageError } from '../errors.js';

const PREFIX = 'hf:';
const DEFAULT_REVISION = 'main';

export interface HubName {
  /** owner/name */
  readonly repository: string;
  /** A branch, tag or commit. */
  readonly revision: string;
}

/** Whether a text is meant as the name of a model on the hub. A file of such a name is reached as `./hf:…`. */
export function isHubName(text: string): boolean {
  return text.startsWith(PREFIX);
}

export function parseHubName(text: string): HubName {
  const [repository, revision = DEFAULT_REVISION, ...rest] = text.slice(PREFIX.length).split('@');
  // The hub allows no others, and both become names of folders: `--` separates owner and name there.
  const isPart = (part: string) => /^[\w.-]{1,96}$/.test(part) && !/^[-.]|[-.]$|--|\.\./.test(part);
  const parts = repository.split('/');
  if (!isHubName(text) || parts.length !== 2 || !parts.every(isPart) || rest.length > 0)
    throw new UsageError(`${text}: not a model of the hub; write hf:owner/name or hf:owner/name@revision`);
  if (!revision.split('/').every((part) => /^[\w.+-]{1,200}$/.test(part) && !/^\.|\.\./.test(part)))
    throw new UsageError(`${text}: ${JSON.stringify(revision)} is not a revision; give a branch, a tag or a commit`);
  return { repository, revision };
}

export function formatHubName({ repository, revision }: HubName): string {
  return `${PREFIX}${repository}@${revision}`;
}

/** Whether a revision is a whole commit id, which always means the same files. */
export function isCommit(revision: string): boolean {
  return /^[0-9a-f]{40}$/.test(revision);
}

/** Whether `pinned` is `name` with a commit. */
export function isPinOf(pinned: string, name: string): boolean {
  return isHubName(name) && !name.includes('@') && pinned.startsWith(`${name}@`);
}
