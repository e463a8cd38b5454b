/**
 * The secret of a run, from which its ranks derive the key that they authenticate each other with (channel.ts):
 *
 * 1. `TREFOIL_RUN_SECRET`: the secret itself. `trefoil launch` and the recipes in deploy/ create a new one for every run.
 * 2. `TREFOIL_RUN_SECRET_FILE`: a file that holds it.
 * 3. Otherwise the file `run-secret` in the cache folder, which the first rank that needs it creates. It is enough where
 *    all ranks see the same folder: on one machine, or with a shared home folder or TREFOIL_CACHE.
 */
import { createHmac, randomBytes } from 'node:crypto';
import { linkSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';
import { cacheFolder, ensureFolder } from '../../files.js';
import type { RankIdentity } from './identity.js';

const SHORTEST_SECRET = 16;

/** A new random secret. */
export function createSecret(): string {
  return randomBytes(32).toString('hex');
}

/** HMAC key of this start of the run. Every rank derives the same one. */
export function runKey({ runId }: Pick<RankIdentity, 'runId'>, environment: Environment): string {
  // A launcher may start the next attempt while ranks of the failed one still run: they must not meet.
  const attempt = environment['TORCHELASTIC_RESTART_COUNT'] ?? 0;
  return createHmac('sha256', readSecret(environment)).update(`trefoil ${runId} attempt ${attempt}`).digest('hex');
}

function readSecret(environment: Environment): string {
  const given = environment['TREFOIL_RUN_SECRET']?.trim();
  if (given) return expectLong(given, 'TREFOIL_RUN_SECRET');
  const file = environment['TREFOIL_RUN_SECRET_FILE'];
  if (file) return readSecretFile(file, `TREFOIL_RUN_SECRET_FILE: ${file}`);
  const path = join(cacheFolder(environment), 'run-secret');
  try {
    createSecretFile(path);
  } catch (cause) {
    throw new UsageError(
      `the ranks need a common secret, and ${path} cannot be created (${(cause as NodeJS.ErrnoException).code}): ` +
        'set TREFOIL_RUN_SECRET to the same random text on all ranks',
      { cause },
    );
  }
  return readSecretFile(path, path);
}

function readSecretFile(path: string, name: string): string {
  let text: string;
  try {
    const { uid, mode } = statSync(path);
    const isOwn = process.getuid === undefined || uid === process.getuid() || uid === 0;
    if (!isOwn) throw new UsageError(`${name} belongs to another user: use a file of your own`);
    if ((mode & 0o077) !== 0)
      throw new UsageError(`${name} is accessible to other users: run \`chmod 600 ${path}\`, and change the secret`);
    text = readFileSync(path, 'utf8').trim();
  } catch (cause) {
    if (cause instanceof UsageError) throw cause;
    throw new UsageError(`${name} cannot be read (${(cause as NodeJS.ErrnoException).code})`, { cause });
  }
  return expectLong(text, name);
}

/** Creates the file unless it exists. Ranks may call it at once: one file wins, and it is never seen half written. */
function createSecretFile(path: string): void {
  if (statSync(path, { throwIfNoEntry: false })) return;
  ensureFolder(join(path, '..'));
  const aside = `${path}.${process.pid}.${randomBytes(4).toString('hex')}`;
  try {
    writeFileSync(aside, `${createSecret()}\n`, { mode: 0o600, flag: 'wx' });
    linkSync(aside, path);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error; // another rank was faster
  } finally {
    rmSync(aside, { force: true });
  }
}

function expectLong(secret: string, name: string): string {
  if (secret.length >= SHORTEST_SECRET) return secret;
  throw new UsageError(
    `${name} has ${secret.length} characters, at least ${SHORTEST_SECRET} are needed: use the output of \`openssl rand -hex 32\``,
  );
}
