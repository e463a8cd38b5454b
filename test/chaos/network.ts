/** The hub that the chaos run trains from, and how the network to it is spoilt. */
import { availableParallelism, loadavg } from 'node:os';
import { DATASET, numberedDocuments } from '../../src/data/testing/corpora.js';
import { parquetFile } from '../../src/data/testing/parquet.js';
import { type HubServer, type Fault as NetworkFault, startHub } from '../../src/hub/testing/hub-server.js';

export type { NetworkFault };

const FILES = 6;
const DOCUMENTS = 48;
/** Seconds until a source is dead, more on a busy machine; an answer that is silent for a third of it is broken off. */
const TIMEOUT = 20 * Math.min(10, Math.max(1, loadavg()[0] / availableParallelism() / 2));

/** In which order the kinds come, which of them were served since, and every other answer is left alone. */
interface Spoiling {
  kinds: readonly NetworkFault[];
  asked: number;
  spoilt: number;
}

export const KINDS: readonly NetworkFault[] = ['drop', '429', '503', 'truncate', 'stall', 'wrong-range'];

export class Network {
  readonly hub: HubServer;
  readonly #spoiling: Spoiling;

  /** Row groups of two short documents, so that a training of small steps keeps asking for more. */
  static async start(): Promise<Network> {
    const files = Array.from({ length: FILES }, (_, file) => {
      const documents = numberedDocuments(DOCUMENTS, `f${file}-`);
      return [`data/${file}.parquet`, parquetFile({ documents, rowsPerGroup: 2 })] as const;
    });
    const spoiling: Spoiling = { kinds: [], asked: 0, spoilt: 0 };
    const fault = (): NetworkFault | undefined => {
      const { kinds } = spoiling;
      // Every other answer: the second attempt succeeds, and how often one fails does not hang on luck.
      if (kinds.length === 0 || spoiling.asked++ % 2 === 1) return undefined;
      return kinds[spoiling.spoilt++ % kinds.length];
    };
    return new Network(await startHub({ dataset: DATASET, files: new Map(files), fault }), spoiling);
  }

  private constructor(hub: HubServer, spoiling: Spoiling) {
    this.hub = hub;
    this.#spoiling = spoiling;
  }

  /** Answers spoilt since `spoil`. */
  get spoilt(): number {
    return this.#spoiling.spoilt;
  }

  get environment(): Record<string, string> {
    return { HF_ENDPOINT: this.hub.endpoint };
  }

  /** The `data` section of a run that trains from it; nothing is kept on disk, so that every block is fetched. */
  get data(): Record<string, unknown> {
    return {
      source: 'hub',
      path: null,
      hub_dataset: DATASET,
      cache_gb: 0,
      loader_timeout: TIMEOUT,
      workers: 1,
      queue: 2,
    };
  }

  /** Spoils every other answer from here on, in these ways by turns. */
  spoil(kinds: readonly NetworkFault[]): void {
    Object.assign(this.#spoiling, { kinds, asked: 0, spoilt: 0 });
  }

  heal(): void {
    this.#spoiling.kinds = [];
  }
}
