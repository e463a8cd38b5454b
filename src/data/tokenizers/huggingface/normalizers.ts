/** Normalizers: what happens to a text before it is cut into words. */
import { BertNormalizer, PrecompiledNormalizer } from './library.js';
import { expectGrowth, patternOf, replaced, type Step, stepsOf, textOf } from './step.js';

export type Normalizer = (text: string) => string;

export function createNormalizer(step: Step | null | undefined): Normalizer {
  if (!step) return (text) => text;
  switch (step.type) {
    case 'Sequence': {
      const steps = stepsOf(step, 'normalizers').map(createNormalizer);
      return (text) =>
        steps.reduce((before, normalize) => {
          const result = normalize(before);
          expectGrowth(result.length, text);
          return result;
        }, text);
    }
    case 'NFC':
    case 'NFD':
    case 'NFKC':
    case 'NFKD':
      return (text) => text.normalize(step.type);
    case 'Lowercase':
      // Character by character, as in the reference: a whole string would turn a final sigma into another letter.
      return (text) => text.replace(/[^\0-@[-\x7F]/gu, (char) => char.toLowerCase());
    case 'StripAccents':
      return (text) => text.replace(/\p{Mn}/gu, '');
    case 'Strip': {
      const left = step['strip_left'] === true;
      const right = step['strip_right'] === true;
      return (text) => {
        const start = left ? text.replace(/^\p{White_Space}+/u, '') : text;
        return right ? start.replace(/\p{White_Space}+$/u, '') : start;
      };
    }
    case 'Prepend': {
      const prefix = textOf(step, 'prepend');
      return (text) => (text === '' ? text : prefix + text);
    }
    case 'Replace': {
      const [pattern, content] = [patternOf(step), textOf(step, 'content')];
      return (text) => replaced(text, pattern, content);
    }
    case 'BertNormalizer':
    case 'Precompiled': {
      const normalizer = new (step.type === 'Precompiled' ? PrecompiledNormalizer : BertNormalizer)(step);
      return (text) => normalizer.normalize(text);
    }
    default:
      throw new Error(`the normalizer "${step.type}" is not supported`);
  }
}
