/** A worker thread of the data pipeline: fetches, parses, tokenises and packs its lanes, up to what the trainer grants. */

import { setImmediate } from 'node:timers/promises';
import { parentPort, workerData } from 'node:worker_threads';
import { BlobOpener } from '../sources/blob.js';
import { type Cursor, LaneDocuments } from '../sources/documents.js';
import { CorpusOrder } from '../sources/order.js';
import type { CorpusSpec } from '../sources/spec.js';
import { createTokenizer, type Tokenizer } from '../tokenizer.js';
import { describeFailure } from './failure.js';
import { type LaneCounts, LaneSamples } from './lane-samples.js';
import type { FromWorker, LaneTask, WorkerTask } from './messages.js';
import { Ring } from './ring.js';
import { measureTokenizer } from './tokenizer-baseline.js';

const task = workerData as WorkerTask;
const port = task.kind === 'stream' ? task.port : parentPort!;

function send(message: FromWorker): void {
  port.postMessage(message);
}

/** Unused local files that a thread keeps open. */
const KEPT_OPEN = 32;
/** Time that a lane computes before network events and other lanes get a turn. */
const TURN_MS = 2;

class LaneRunner {
  readonly #ring: Ring;
  readonly #wakers = new Set<() => void>();
  readonly #counts: LaneCounts = { documents: 0, bytes: 0 };
  readonly #worker: number;
  /** Time of the last yield to the event loop. */
  #turnBegan = 0;

  constructor(ring: Ring, worker: number) {
    this.#ring = ring;
    this.#worker = worker;
    port.on('message', () => {
      const wakers = [...this.#wakers];
      this.#wakers.clear();
      for (const wake of wakers) wake();
    });
  }

  async run(
    spec: CorpusSpec,
    lane: LaneTask,
    tokenizer: Tokenizer,
    opener: BlobOpener,
    settings: { documentBatch: number; fetchAhead: boolean },
  ): Promise<void> {
    const ring = this.#ring;
    const cursor: Cursor = lane.cursor;
    const { documentBatch, fetchAhead } = settings;
    const documents = new LaneDocuments(new CorpusOrder(spec), lane.lane, {
      side: lane.side,
      cursor,
      fetchAhead,
      opener,
    });
    const samples = new LaneSamples(documents, tokenizer, {
      cursor,
      documentBatch,
      counts: this.#counts,
      keepTail: lane.side === 'once',
    });
    const window = new Int32Array(ring.shape.sequenceLength + 1);
    for (let sample = 0; ; sample++) {
      await this.#granted(lane.ring, sample);
      const behind = await samples.fill(window);
      if (behind === undefined) {
        if (ring.end(lane.ring)) send({ kind: 'news' });
        return;
      }
      ring.window(lane.ring, sample).set(window);
      ring.count(this.#worker, this.#counts.documents, this.#counts.bytes);
      if (ring.publish(lane.ring, sample, behind, samples.epoch)) send({ kind: 'news' });
      if (performance.now() - this.#turnBegan < TURN_MS) continue;
      await setImmediate();
      this.#turnBegan = performance.now();
    }
  }

  async #granted(ringLane: number, sample: number): Promise<void> {
    while (this.#ring.granted(ringLane) <= sample) {
      const woken = new Promise<void>((resolve) => this.#wakers.add(resolve));
      this.#ring.announceSleep(this.#worker);
      if (this.#ring.granted(ringLane) > sample) return;
      await woken;
    }
  }
}

async function main(): Promise<void> {
  if (task.kind === 'baseline') return measureTokenizer(task, send);
  const ring = new Ring(task.ring);
  const runner = new LaneRunner(ring, task.worker);
  const tokenizer = createTokenizer(task.tokenizer);
  const opener = new BlobOpener(task.spec, { keptOpen: KEPT_OPEN });
  const running = task.lanes.map((lane) => runner.run(task.spec, lane, tokenizer, opener, task));
  try {
    await Promise.all(running);
  } catch (error) {
    // The message first: the trainer looks for it when it sees the flag.
    send(describeFailure(error));
    ring.fail();
    throw error;
  }
}

main().catch((error) => {
  // A failing lane was reported above; a failing measurement is reported here. The thread ends either way.
  if (task.kind !== 'stream') send(describeFailure(error));
  process.exit(1);
});
