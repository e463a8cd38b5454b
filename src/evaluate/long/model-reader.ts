/** Reads the cases of `eval long` with a loaded model. */

import { prefill, prefillTile, readRows } from '../../infer/decode.js';
import { generate } from '../../infer/generate.js';
import type { LoadedModel } from '../../infer/load.js';
import { encodePrompt } from '../../infer/prompt.js';
import { endTokensOf, usedVocabulary } from '../../infer/text-source.js';
import type { Observer } from '../../model/attention.js';
import { DecodeCache } from '../../model/cache.js';
import type { SparseOptions } from '../../ops/attention/nsa.js';
import type { Reader, Scores } from './evaluate.js';

/** Tokens of a generated answer at most. */
export const ANSWER_TOKENS = 32;

export function modelReader(loaded: LoadedModel, kernels: SparseOptions = {}): Reader {
  const { model, tokenizer, config } = loaded;
  const { shape } = model;
  const encode = (text: string) => encodePrompt(text, tokenizer, usedVocabulary(loaded));

  /** Whether the last token read by `observer` selected the block of every one of these tokens. */
  function selectionOf() {
    const blocks = new Set<number>();
    let isCalled = false;
    const layers = new Map<number, number[]>();
    const observer: Observer = {
      selected: (layer, selected) => {
        isCalled = true;
        const [tokens] = selected.shape;
        layers.set(layer, Array.from(selected.rows(tokens - 1, tokens).read()));
      },
    };
    const seen = (tokens: readonly number[]): boolean | null => {
      if (!isCalled || tokens.length === 0) return null;
      for (const chosen of layers.values()) for (const block of chosen) blocks.add(block);
      return tokens.every((token) => blocks.has(Math.floor(token / shape.nsa.lSel)));
    };
    return { observer, seen };
  }

  return {
    async score(prompt, candidates, characters): Promise<Scores> {
      const texts = [encode(prompt), ...candidates.map((candidate) => encode(`${prompt} ${candidate}`))];
      // A prompt of one word may share no token with its continuations: then they follow a separator.
      const start = commonPrefix(texts) === 0 ? [tokenizer.separator] : [];
      const whole = texts.slice(1).map((tokens) => [...start, ...tokens]);
      const shared = start.length + commonPrefix(texts);
      const cache = new DecodeCache(model.device, shape, model.dtype);
      const sequence = cache.sequence();
      try {
        const { observer, seen } = selectionOf();
        const read = whole[0].slice(0, shared);
        const [first] = prefill(model, [sequence], [read], prefillTile(config), { kernels, observer });
        const logprobs = whole.map((tokens) => {
          const rest = tokens.slice(shared);
          const fork = sequence.fork();
          try {
            const given = rest.slice(0, -1);
            const rows = given.length === 0 ? [] : readRows(model, [fork], [given], [...given.keys()], { kernels });
            return [first, ...rows].reduce((sum, logits, i) => sum + logProbability(logits, rest[i]), 0);
          } finally {
            fork.free();
          }
        });
        return { logprobs, seen: seen(characters.map((end) => encode(prompt.slice(0, end)).length - 1)) };
      } finally {
        sequence.free();
      }
    },
    async generate(prompt) {
      let text = '';
      const options = { maxNewTokens: ANSWER_TOKENS, sampling: { temperature: 0 }, stop: ['\n'] };
      const maxContext = encode(prompt).length + ANSWER_TOKENS + 1;
      for await (const piece of generate({ ...loaded, endTokens: endTokensOf(loaded) }, prompt, {
        ...options,
        maxContext,
      }))
        text += piece;
      return text;
    },
  };
}

/** Tokens that all of these begin with. */
function commonPrefix([first, ...others]: readonly (readonly number[])[]): number {
  const differs = first.findIndex((token, i) => others.some((other) => other[i] !== token));
  return differs === -1 ? first.length : differs;
}

function logProbability(logits: Float32Array, token: number): number {
  let most = Number.NEGATIVE_INFINITY;
  for (const logit of logits) most = Math.max(most, logit);
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - most);
  return logits[token] - most - Math.log(sum);
}
