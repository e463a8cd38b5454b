/** Messages between the page and its worker, which holds the device and the model. */

/** A request of the page. Requests are answered one after the other; training waits for them between two steps. */
export type Request =
  | { readonly type: 'train' }
  | { readonly type: 'pause' }
  | { readonly type: 'write'; readonly prompt: string; readonly temperature: number }
  | { readonly type: 'stop' }
  | { readonly type: 'ask' }
  | { readonly type: 'save' }
  | { readonly type: 'load'; readonly config: Blob; readonly weights: Blob };

/** How the worker was started. */
export interface Settings {
  /** Replaces `train.steps`. */
  readonly steps: number | null;
  readonly threads: number | null;
  /** Kernels without fused products. */
  readonly plain: boolean;
}

export interface Machine {
  readonly threads: number;
  /** Whether the page may share memory between threads. */
  readonly isIsolated: boolean;
  /** File of the kernels, and whether its results have the bits of native kernels. */
  readonly kernels: string;
  readonly isFused: boolean;
}

/** The model that the worker holds. */
export interface ModelFacts {
  readonly step: number;
  readonly steps: number;
  readonly parameters: number;
  /** Blocks read per group, tokens of a block, tokens of the window; null for a model with dense attention. */
  readonly attention: { readonly nSel: number; readonly lSel: number; readonly w: number } | null;
  /** Whether it is one that the page began; others are only run. */
  readonly isTrainable: boolean;
  /** Whether it knows the words of the stories, about which the page can ask. */
  readonly hasStories: boolean;
}

export interface StepPoint {
  readonly step: number;
  readonly loss: number;
  readonly tokensPerSecond: number;
}

export interface EvaluationPoint {
  readonly step: number;
  /** Mean loss on stories it never saw. */
  readonly loss: number;
  /** Share of right answers, and how many questions there were. */
  readonly recall: number;
  readonly questions: number;
}

/** The trace of a text: arrays as in src/evaluate/trace.ts. */
export interface TraceArrays {
  readonly pieces: readonly string[];
  readonly logprobs: Float32Array;
  readonly selected: Int16Array;
  readonly gates: Uint8Array;
  readonly layers: number;
  readonly groups: number;
  readonly slots: number;
  readonly blockSize: number;
  readonly window: number;
}

export interface Answer {
  /** Counts the answers of the worker. */
  readonly number: number;
  readonly thing: string;
  readonly place: string;
  readonly said: string;
  readonly isCorrect: boolean;
  /** Tokens between the fact and the question. */
  readonly distance: number;
  readonly factAt: number;
  readonly questionAt: number;
  /** Whether the block of the fact is among those that were read. */
  readonly hasReadFact: boolean;
  readonly trace: TraceArrays;
}

/** A message of the worker. */
export type Event =
  | { readonly type: 'ready'; readonly machine: Machine; readonly model: ModelFacts }
  | { readonly type: 'model'; readonly model: ModelFacts; readonly name: string }
  | { readonly type: 'step'; readonly point: StepPoint }
  | { readonly type: 'evaluation'; readonly point: EvaluationPoint }
  | { readonly type: 'training'; readonly isRunning: boolean }
  | { readonly type: 'piece'; readonly text: string }
  | { readonly type: 'written' }
  | { readonly type: 'answer'; readonly answer: Answer }
  | { readonly type: 'saved'; readonly config: Blob; readonly weights: Blob }
  | { readonly type: 'error'; readonly message: string; readonly isFatal: boolean };
