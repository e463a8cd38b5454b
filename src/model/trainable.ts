/** Which parameters of a model are trained: `train.trainable`, and adapters alone in a model that has some. */
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { Parameter } from '../tensor/parameter.js';

/**
 * The parameters that are trained; freezes the others. Each pattern of `train.trainable` is a whole name in which `*`
 * stands for any characters. Throws for one that names no parameter.
 */
export function trainedParameters(
  parameters: readonly Parameter[],
  { train }: Pick<Config, 'train'>,
): readonly Parameter[] {
  const names = parameters.map(({ name }) => name);
  const isTrained = train.trainable === null ? () => true : matcher(train.trainable, names);
  for (const parameter of parameters) if (!isTrained(parameter.name)) parameter.freeze();
  return parameters.filter(({ isFrozen }) => !isFrozen);
}

/** Whether a name fits one of the patterns. */
export function matcher(patterns: readonly string[], names: readonly string[]): (name: string) => boolean {
  const expressions = patterns.map((pattern) => {
    const parts = pattern.split('*').map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
    const expression = new RegExp(`^${parts.join('.*')}$`);
    if (!names.some((name) => expression.test(name)))
      throw new UsageError(
        `train.trainable: ${pattern} names no parameter of this model; names are such as ${examples(names)}`,
      );
    return expression;
  });
  return (name) => expressions.some((expression) => expression.test(name));
}

/** The names of one block, and those outside of blocks. */
function examples(names: readonly string[]): string {
  return names.filter((name) => !/^(blocks|layers)\.(?!0\.)/.test(name)).join(', ');
}
