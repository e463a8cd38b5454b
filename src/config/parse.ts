/** Parses a plain object to a config. Earlier names of keys are understood, and a path without a source gets the one that reads it. */
import { UsageError } from '../errors.js';
import { checkAsGiven, configOf } from './check.js';
import { withImpliedSource } from './implied-source.js';
import { withPresentNamesIn } from './legacy/keys.js';
import type { Config, ConfigInput } from './schema.js';
import { shippedConfigs } from './shipped.js';

/** As `checkAsGiven`, with earlier names of keys, and with the source that a path implies. */
export function checkConfig(given: unknown): ReturnType<typeof checkAsGiven> {
  return checkAsGiven(withImpliedSource(withPresentNamesIn(given)));
}

/**
 * A whole config from a plain object: omitted keys take their defaults, wrong ones throw a `UsageError` by name. Without an
 * argument it throws too: the defaults are a model of 125 million parameters, more than a first try needs.
 */
export function parseConfig(input: ConfigInput): Config {
  if (input === undefined)
    throw new UsageError(
      `parseConfig: give the keys that differ from configs/base.yaml, or take a shipped config with readConfig(name): ` +
        `one of ${shippedConfigs().join(', ')}`,
    );
  return parseSavedConfig(input);
}

/** A config from a file (a run's config.yaml, a checkpoint's state.json), whose content is not trusted. */
export function parseSavedConfig(input: unknown): Config {
  return configOf(checkConfig(input));
}
