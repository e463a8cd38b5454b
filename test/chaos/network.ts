/** The hub that the chaos run trains from, and how the network to it is spoilt. */
import { DATASET, numberedDocuments } from '../../src/data/testing/corpora.js';
import { type HubServer, type Fault as NetworkFault, startHub } from '../../src/data/testing/hub-server.js';
import { parquetFile } from '../../src/data/testing/parquet.js';

export type { NetworkFault };

const FILES = 6;
const DOCUMENTS = 48;
/** Seconds until a source is dead; an answer that is silent for a third of it is broken off. */
const TIMEOUT = 4;

export class Network {
  readonly hub: HubServer;
  readonly #state: { kind: NetworkFault | undefined; asked: number; spoilt: number };

  /** Row groups of two short documents, so that a training of small steps keeps asking for more. */
  static async start(): Promise<Network> {
    const files = Array.from({ length: FILES }, (_, file) => {
      const documents = numberedDocuments(DOCUMENTS, `f${file}-`);
      return [`data/${file}.parquet`, parquetFile({ documents, rowsPerGroup: 2 })] as const;
    });
    const state = { kind: undefined as NetworkFault | undefined, asked: 0, spoilt: 0 };
    const fault = (): NetworkFault | undefined => {
      // Every other answer: the second attempt succeeds, and what was spoilt does not hang on luck.
      if (state.kind === undefined || state.asked++ % 2 === 1) return undefined;
      state.spoilt++;
      return state.kind;
    };
    return new Network(await startHub({ dataset: DATASET, files: new Map(files), fault }), state);
  }

  private constructor(hub: HubServer, state: { kind: NetworkFault | undefined; asked: number; spoilt: number }) {
    this.hub = hub;
    this.#state = state;
  }

  /** Answers spoilt so far. */
  get spoilt(): number {
    return this.#state.spoilt;
  }

  get environment(): Record<string, string> {
    return { HF_ENDPOINT: this.hub.endpoint };
  }

  /** The `data` section of a run that trains from it; nothing is kept on disk, so that every block is fetched. */
  get data(): Record<string, unknown> {
    return {
      ...{ source: 'fineweb_edu', path: null, hub_dataset: DATASET, cache_gb: 0 },
      ...{ loader_timeout: TIMEOUT, workers: 1, fwe_queue: 2 },
    };
  }

  /** Spoils every other answer from here on. */
  spoil(kind: NetworkFault): void {
    this.#state.kind = kind;
    this.#state.asked = 0;
  }

  heal(): void {
    this.#state.kind = undefined;
  }
}
