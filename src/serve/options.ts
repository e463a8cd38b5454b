/** Options of a server and of a served model, in types that need nothing of Node. */
import type { EngineOptions } from '../infer/engine/interface.js';
import type { LoadOptions } from '../infer/load.js';

/** A static file. */
export interface ServedPage {
  readonly headers: Readonly<Record<string, string>>;
  readonly content: Uint8Array;
}

/** Where a server listens, and what it accepts. */
export interface ListenOptions {
  /** Default 127.0.0.1. Any address that is not loopback needs keys. */
  readonly host?: string;
  /** 0 takes a free port. Default 8080. */
  readonly port?: number;
  /** Accepted keys. Without keys the server listens on loopback only and answers only requests whose Host is loopback. */
  readonly keys?: readonly string[];
  /** Choices that may wait. Default 256. */
  readonly maxQueued?: number;
  /** Tokens of prompts that run or wait. Default: (`maxBatch` + 8) times the context, so 8 contexts may wait as in an engine. */
  readonly maxQueuedTokens?: number;
  /** Jinja template of chats. Default: that of the model's tokenizer. */
  readonly chatTemplate?: string;
  /** The origin that browsers may call from; CORS is off without it. */
  readonly corsOrigin?: string;
  /** Static files by path, `/` among them. They need no key: a page has to be there before a key can be typed into it. */
  readonly pages?: ReadonlyMap<string, ServedPage>;
  /** Gets one line of JSON per request. */
  readonly log?: (line: string) => void;
}

/** Options of `serveModel`. */
export interface ServeOptions extends ListenOptions {
  /** The name of the model in the API. Default: the name of its folder. */
  readonly id?: string;
  /** Default `auto`: a GPU where there is one. */
  readonly device?: 'auto' | 'cpu' | 'cuda';
  /** Threads of the CPU. */
  readonly threads?: number;
  /** Type of activations. Default: bf16 on CUDA, else fp32. */
  readonly precision?: 'fp32' | 'bf16';
  /** In what type the CPU holds weights. Default `file`. */
  readonly weights?: LoadOptions['weights'];
  /** Folder of a LoRA adapter, which is added to the weights (`loadModel`). */
  readonly adapter?: string;
  /** How requests are batched and cached. The length of the queue is the server's `maxQueued`. */
  readonly engine?: Omit<EngineOptions, 'maxQueued' | 'maxQueuedTokens'>;
  /** Gets lines for people while the model is loaded: what is loaded, warnings. */
  readonly say?: (line: string) => void;
}

/** A model that answers over HTTP. */
export interface ModelServer {
  /** `http://HOST:PORT` */
  readonly url: string;
  /**
   * Accepts no more requests, waits up to `seconds` for those under way and cancels the rest, then frees the model.
   * Default 30.
   */
  close(seconds?: number): Promise<void>;
}
