// The tasks of inference.mjs for both programs, and how they count: seconds of processor time of all threads.
export const TASKS = {
  first: { prompt: 1, decode: 1, batch: 1, length: 512 },
  decode: { prompt: 128, decode: 48, batch: 1, length: 512 },
  long: { prompt: 4000, decode: 24, batch: 1, length: 4608 },
  prompt: { prompt: 512, decode: 0, batch: 1, length: 1024 },
  batch4: { prompt: 16, decode: 24, batch: 4, length: 512 },
  batch5: { prompt: 16, decode: 24, batch: 5, length: 512 },
  batch32: { prompt: 16, decode: 8, batch: 32, length: 512 },
};

export function cpuSeconds() {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

let result = null;

/** Runs a task once, after a short one that wakes threads and compiles JavaScript (but for the first token). */
export async function measure(name, run) {
  const { prompt: count, ...rest } = TASKS[name];
  const prompt = (length) => Array.from({ length }, (_, i) => 300 + ((i * 7919) % 30_000));
  if (name !== 'first') await run({ ...rest, prompt: prompt(Math.min(count, 64)), decode: Math.min(rest.decode, 12) });
  const counts = await run({ ...rest, prompt: prompt(count) });
  const { decode, batch } = rest;
  result = {
    ...(name === 'first' && { seconds: counts.firstTokenSeconds }),
    ...(decode > 1 && { perSecond: (decode * batch) / counts.decodeSeconds }),
    ...(decode === 0 && { perSecond: (count - 1) / counts.promptSeconds }),
    tokens: counts.tokens.slice(0, 4),
    rss: process.resourceUsage().maxRSS * 1024,
  };
}

export function report() {
  console.log(JSON.stringify(result));
}
