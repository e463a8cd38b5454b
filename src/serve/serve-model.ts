/** A model over HTTP in one call: the server in this thread, the model in a thread of its own. */
import { basename, resolve } from 'node:path';
import { WorkerHost } from './host.js';
import type { ModelServer, ServeOptions } from './options.js';
import { startServer } from './server.js';
import { warmUp } from './warm-up.js';

const DRAIN_SECONDS = 30;

/**
 * Serves a model with the OpenAI API. The server listens at once and answers 503 until the model is loaded; then this
 * resolves. `model` is a run folder, a checkpoint folder, or a model.safetensors with its config.json.
 */
export async function serveModel(
  model: string,
  { device = 'auto', threads, precision, weights, adapter, engine, say = () => {}, ...options }: ServeOptions = {},
): Promise<ModelServer> {
  const id = options.id ?? basename(resolve(adapter ?? model));
  const server = await startServer(null, { ...options, id });
  say(`loading ${model}: ${server.url}/health answers 503 until it is ready`);
  const settings = {
    model,
    device,
    // The server bounds the queue; the engine takes what it accepted.
    engine: { ...engine, maxQueued: Number.MAX_SAFE_INTEGER, maxQueuedTokens: Number.MAX_SAFE_INTEGER },
    ...(threads === undefined ? {} : { threads }),
    ...(precision === undefined ? {} : { precision }),
    ...(weights === undefined ? {} : { weights }),
    ...(adapter === undefined ? {} : { adapter }),
  };
  let host: WorkerHost;
  try {
    host = await WorkerHost.start(settings, say);
  } catch (error) {
    await server.drain(0);
    throw error;
  }
  await warmUp(host.info, id);
  server.attach(host);
  return {
    url: server.url,
    close: async (seconds = DRAIN_SECONDS) => {
      await server.drain(seconds);
      await host.close();
    },
  };
}
