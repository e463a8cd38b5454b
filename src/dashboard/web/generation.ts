/** Requests of the playground to the model: one generation or one reading at a time. */
import { useEffect, useRef, useState } from 'preact/hooks';
import { number, whole } from './format.js';
import { type GeneratedToken, type GenerationRequest, generate, readText, type ToolCall } from './model-api.js';

/** One generation at a time, with its speed. */
export function useGeneration(key: string) {
  const [state, setState] = useState<{ isRunning: boolean; status: string; error: string | null }>({
    isRunning: false,
    status: '',
    error: null,
  });
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  const start = async (
    request: GenerationRequest,
    onTokens: (tokens: readonly GeneratedToken[]) => void,
    onOthers: (reasoning: string, calls: readonly ToolCall[]) => void = () => {},
  ) => {
    abort.current?.abort();
    const controller = new AbortController();
    abort.current = controller;
    const startedAt = performance.now();
    let [count, firstAt, lastAt] = [0, 0, 0];
    let finish = '';
    const speed = () => (count > 1 ? `${number((1000 * (count - 1)) / Math.max(1, lastAt - firstAt))} tokens/s` : '');
    const facts = (state: string) =>
      [state, `${whole(count)} tokens`, speed(), firstAt ? `first after ${number((firstAt - startedAt) / 1000)} s` : '']
        .filter(Boolean)
        .join(' · ');
    setState({ isRunning: true, status: 'waiting', error: null });
    try {
      await generate(request, key, controller.signal, {
        onProgress: (processed, total) => {
          if (count === 0)
            setState({ isRunning: true, status: `prompt: ${whole(processed)} of ${whole(total)} tokens`, error: null });
        },
        onTokens: (tokens) => {
          if (controller.signal.aborted) return;
          lastAt = performance.now();
          firstAt ||= lastAt;
          count += tokens.length;
          onTokens(tokens);
          setState({ isRunning: true, status: facts('writing'), error: null });
        },
        onOthers: (reasoning, calls) => {
          if (!controller.signal.aborted) onOthers(reasoning, calls);
        },
        onEnd: (reason) => {
          finish = reason;
        },
      });
      setState({ isRunning: false, status: facts(FINISHED[finish] ?? finish), error: null });
    } catch (error) {
      const isStopped = controller.signal.aborted;
      if (isStopped && abort.current !== controller) return; // another one runs
      const status = isStopped ? facts('stopped') : '';
      setState({ isRunning: false, status, error: isStopped ? null : (error as Error).message });
    }
  };
  return { ...state, start, stop: () => abort.current?.abort() };
}

const FINISHED: Readonly<Record<string, string>> = {
  stop: 'ended by itself',
  length: 'ended at the limit of tokens',
  tool_calls: 'called tools',
};

/** Reads a text on the model and shows the trace. */
export function useReading(key: string) {
  const idle = { isReading: false, done: 0, layers: null as number | null, error: null as string | null };
  const [state, setState] = useState(idle);
  const isGone = useRef(false);
  useEffect(
    () => () => {
      isGone.current = true;
    },
    [],
  );
  const start = async (request: GenerationRequest) => {
    setState({ ...idle, isReading: true });
    try {
      const id = await readText(request, key, (done, layers) => setState({ ...idle, isReading: true, done, layers }));
      if (!isGone.current) location.assign(`#/playground/${id}`);
    } catch (error) {
      setState({ ...idle, error: (error as Error).message });
    }
  };
  return { ...state, start };
}
