/** The worker thread of a server: loads the model and runs its engine. */
import { parentPort, workerData } from 'node:worker_threads';
import { openDevice } from '../device/open.js';
import { ExitCode, TrefoilError } from '../errors.js';
import { withEnvironment } from '../infer/environment.js';
import { loadModel } from '../infer/load.js';
import { type FromWorker, serveThread, type WorkerSettings } from './host.js';

if (!parentPort) throw new Error('this module is the program of a worker thread');
const {
  model: path,
  device: kind,
  threads,
  precision,
  weights = 'file',
  adapter,
  engine,
} = workerData as WorkerSettings;
try {
  // Without trials of algorithms: prompts have too many lengths for them, and a restart must not change answers.
  const device = openDevice(kind, { ...(threads === undefined ? {} : { threads }), deterministic: true });
  const dtype = precision === undefined ? undefined : precision === 'bf16' ? 'bf16' : 'f32';
  const { model, tokenizer, config, step, warnings, endTokens } = loadModel(device, path, dtype, { weights, adapter });
  const describe = `model: ${path}${adapter === undefined ? '' : ` with ${adapter}`} (step ${step}, ${model.parameterCount.toLocaleString('en')} parameters, ${device.kind})`;
  const source = { model, tokenizer, endTokens, config: withEnvironment(config, process.env) };
  await serveThread(parentPort, source, engine, { warnings, describe });
} catch (error) {
  if (!(error instanceof TrefoilError)) throw error;
  const refused: FromWorker = { type: 'refused', message: error.message, exitCode: error.exitCode ?? ExitCode.failed };
  parentPort.postMessage(refused);
}
