/** The worker of the page: trains and runs a model on the processor, through WebAssembly. */
import {
  type BrowserModel,
  createModel,
  generate,
  hasThreads,
  loadModel,
  openBatches,
  openDevice,
  parseConfig,
  saveModel,
  Training,
} from 'trefoil/browser';
import {
  answerRecalls,
  inspectRecall,
  modelPredictor,
  type RecallStory,
  recallStory,
} from '../../src/evaluate/recall.js';
import { traceText } from '../../src/evaluate/trace.js';
import { turn } from '../../src/turn.js';
import type { Answer, Event, ModelFacts, Request, Settings } from './protocol.js';
import { STORY_CONFIG } from './story-config.js';

/** The part of a worker's globals that is used here. */
interface Scope {
  onmessage: ((event: { readonly data: Request }) => void) | null;
  postMessage(message: Event): void;
  readonly name: string;
}
const scope = globalThis as unknown as Scope;
const say = (event: Event) => scope.postMessage(event);

const SAMPLE_TOKENS = 480;
/** As `trefoil start`: questions in stories of up to 12 scenes, at these distances between fact and question [tokens]. */
const RECALL = { seed: 7, stories: 120, quick: 40, maxScenes: 12, from: 32, to: 512 };
const EVALUATE_EVERY = 250;
/** Scenes of the stories that the page asks about. */
const ASKED_SCENES = 9;

class Session {
  #model: BrowserModel;
  #training: Training | null;
  #batches: ReturnType<typeof openBatches> | null;
  #isTraining = false;
  #isStopped = false;
  #asked = 0;
  #answers = 0;
  /** The last of the requests: training waits for it. */
  #job: Promise<void> = Promise.resolve();

  constructor(
    readonly device: Awaited<ReturnType<typeof openDevice>>,
    settings: Settings,
  ) {
    const steps = settings.steps ?? STORY_CONFIG.train.steps;
    const config = parseConfig({ ...STORY_CONFIG, train: { ...STORY_CONFIG.train, steps } });
    this.#model = createModel(device, config);
    this.#batches = openBatches(config, this.#model.tokenizer);
    this.#training = new Training({ model: this.#model.model, config, batches: this.#batches });
  }

  get facts(): ModelFacts {
    const { model, config, tokenizer } = this.#model;
    const { nsa, attention } = model.shape;
    return {
      step: this.#training?.steps ?? this.#model.step,
      steps: config.train.steps,
      parameters: model.parameters.reduce((sum, { value }) => sum + value.size, 0),
      attention: attention === 'nsa' ? { nSel: nsa.nSel, lSel: nsa.lSel, w: nsa.w } : null,
      isTrainable: this.#training !== null,
      hasStories: tokenizer.name === 'stories',
    };
  }

  handle(request: Request): void {
    switch (request.type) {
      case 'train':
        if (!this.#isTraining) void this.#train();
        return;
      case 'pause':
        this.#isTraining = false;
        return;
      case 'stop':
        this.#isStopped = true;
        return;
      case 'write':
        this.#run(() => this.#write(request.prompt, request.temperature));
        return;
      case 'ask':
        this.#run(async () => say({ type: 'answer', answer: this.#ask() }));
        return;
      case 'save':
        this.#run(async () => say({ type: 'saved', ...saveModel(this.#model, this.facts.step) }));
        return;
      case 'load':
        this.#run(() => this.#load(request.config, request.weights));
        return;
    }
  }

  /** Runs a request after those before it. */
  #run(work: () => Promise<void>): void {
    this.#job = this.#job.then(work).catch((error: unknown) => sayError(error, false));
  }

  async #train(): Promise<void> {
    const training = this.#training;
    if (!training) return;
    this.#isTraining = true;
    say({ type: 'training', isRunning: true });
    try {
      while (this.#isTraining && this.#training === training) {
        const started = performance.now();
        const step = training.step();
        if (!step) break;
        const tokensPerSecond = (1000 * step.tokens) / (performance.now() - started);
        say({ type: 'step', point: { step: step.step, loss: step.loss, tokensPerSecond } });
        const isLast = step.step === this.#model.config.train.steps;
        if (isLast || step.step % EVALUATE_EVERY === 0) this.#evaluate(step.step, isLast);
        await turn();
        await this.#job;
      }
    } catch (error) {
      sayError(error, true);
    }
    this.#isTraining = false;
    say({ type: 'training', isRunning: false });
  }

  /** In full after the last step, with fewer questions before. */
  #evaluate(step: number, isFull: boolean): void {
    const { model, config } = this.#model;
    const loss = this.#training!.evaluate(this.#batches!.evalBatches(config.train.eval_batches));
    const stories = Array.from({ length: isFull ? RECALL.stories : RECALL.quick }, (_, number) =>
      this.#story(number, number % (RECALL.maxScenes + 1)),
    );
    const answers = answerRecalls(stories, modelPredictor(model)).filter(
      ({ distance }) => distance >= RECALL.from && distance < RECALL.to,
    );
    const correct = answers.filter(({ isCorrect }) => isCorrect).length;
    say({
      type: 'evaluation',
      point: { step, loss, recall: correct / answers.length, questions: answers.length },
    });
  }

  #story(number: number, scenes: number): RecallStory {
    return recallStory(this.#model.tokenizer, RECALL.seed, number, scenes);
  }

  async #write(prompt: string, temperature: number): Promise<void> {
    this.#isStopped = false;
    const sampling = { temperature, topK: 40, topP: 1, seed: 7 };
    const pieces = generate(this.#model, prompt, { maxNewTokens: SAMPLE_TOKENS, sampling });
    try {
      for await (const text of pieces) {
        say({ type: 'piece', text });
        if (this.#isStopped) break;
      }
    } finally {
      say({ type: 'written' });
    }
  }

  /** Asks for the farthest fact of the next story, and notes all that the model read until then. */
  #ask(): Answer {
    const { model, tokenizer } = this.#model;
    const story = this.#story(1000 + this.#asked++, ASKED_SCENES);
    const asked = story.cases
      .filter(({ at, factAt }) => at - factAt < RECALL.to)
      .reduce((best, one) => (one.at - one.factAt > best.at - best.factAt ? one : best));
    const questionAt = asked.at - 1;
    const { predicted, read } = inspectRecall(model, story.tokens.subarray(0, asked.at), questionAt);
    const tokens = [...story.tokens.subarray(0, asked.at), predicted];
    const { logprobs, selected, gates } = traceText(model, tokens);
    const { nLayers: layers, nKvGroups: groups, nsa } = model.shape;
    const factBlock = Math.floor(asked.factAt / nsa.lSel);
    return {
      number: this.#answers++,
      thing: asked.recall.thing,
      place: asked.recall.place,
      said: tokenizer.decode([predicted]),
      isCorrect: predicted === story.tokens[asked.at],
      distance: asked.at - asked.factAt,
      factAt: asked.factAt,
      questionAt,
      hasReadFact: read.some((byGroup) => byGroup.some((blocks) => blocks.includes(factBlock))),
      trace: {
        pieces: tokens.map((token) => tokenizer.decode([token])),
        ...{ logprobs, selected, gates, layers, groups },
        slots: nsa.nSel,
        blockSize: nsa.lSel,
        window: nsa.w,
      },
    };
  }

  /** Replaces the model by one that the user gave the page. */
  async #load(config: Blob, weights: Blob): Promise<void> {
    const loaded = await loadModel(this.device, { config, weights });
    this.#isTraining = false;
    this.#training?.free();
    this.#model.free();
    this.#training = null;
    this.#batches = null;
    this.#model = loaded;
    this.#asked = 0;
    say({ type: 'model', model: this.facts, name: (weights as File).name });
  }
}

function sayError(error: unknown, isFatal: boolean): void {
  say({ type: 'error', message: error instanceof Error ? error.message : String(error), isFatal });
}

async function start(): Promise<void> {
  const settings = JSON.parse(scope.name) as Settings;
  const { threads, plain } = settings;
  const waiting: Request[] = [];
  scope.onmessage = ({ data }) => void waiting.push(data);
  const device = await openDevice({ plain, ...(threads !== null && { threads }) });
  const session = new Session(device, settings);
  const { kernelSource: source } = device;
  const machine = {
    threads: device.threads,
    isIsolated: hasThreads(),
    kernels: source.name,
    isFused: source.isFused,
  };
  say({ type: 'ready', machine, model: session.facts });
  scope.onmessage = ({ data }) => session.handle(data);
  for (const request of waiting) session.handle(request);
}

start().catch((error: unknown) => sayError(error, true));
