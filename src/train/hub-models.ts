/** Models of the hub that a config names: they are downloaded, and the run stores their commits. */
import { describeProgress } from '../byte-progress.js';
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import { isHubName, isPinOf } from '../hub/name.js';
import type { World } from './ranks/world.js';
import type { RankLogger } from './report.js';

/**
 * The config with the commits of the models in `train.init_from` and `data.tokenizer`, which are in the cache then. A run that
 * resumes keeps the commits that it began with, and does not need the model it started from.
 */
export async function pinHubModels(
  config: Config,
  saved: Config | null,
  world: World,
  log: RankLogger,
): Promise<Config> {
  const { init_from: initial } = config.train;
  const { tokenizer } = config.data;
  if (!isHubName(initial ?? '') && !isHubName(tokenizer)) return config;
  const pull = async (key: string, name: string | null, before: string | null | undefined, isNeeded: boolean) => {
    if (name === null || !isHubName(name)) return name;
    const known = before && isPinOf(before, name) ? before : name;
    return isNeeded ? await pullOn(key, known, world, log) : known;
  };
  const pinned = await world.agreement.firstThenOthers(
    async () => ({
      initial: await pull('train.init_from', initial, saved?.train.init_from, saved === null),
      tokenizer: await pull('data.tokenizer', tokenizer, saved?.data.tokenizer, true),
    }),
    world.isFirstOfHost,
  );
  return {
    ...config,
    data: { ...config.data, tokenizer: pinned.tokenizer! },
    train: { ...config.train, init_from: pinned.initial },
  };
}

async function pullOn(key: string, name: string, world: World, log: RankLogger): Promise<string> {
  const { pullModel } = await import('../hub/pull.js'); // most runs download nothing
  const started = performance.now();
  // The first rank has asked the hub. If the others asked again, they could get a newer commit.
  const environment = world.isFirstOfHost ? process.env : { ...process.env, HF_HUB_OFFLINE: '1' };
  try {
    const pulled = await pullModel(name, {
      environment,
      onProgress: (done, total) => log.live?.show(describeProgress(done, total, performance.now() - started)),
      onWarning: log.warnOwn,
    });
    log.say(`${key}: ${pulled.name}`);
    return pulled.name;
  } catch (error) {
    throw error instanceof UsageError ? new UsageError(`${key}: ${error.message}`) : error;
  } finally {
    log.live?.clear();
  }
}
