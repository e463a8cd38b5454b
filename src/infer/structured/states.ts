/**
 * The states of texts that are matched with one grammar. A state is a set of configurations, each a node with the nodes to
 * return to; they are interned, so that what was computed for one is found again. What a state is never depends on which
 * states were looked at before: texts of other requests may have done so.
 */
import { closesSooner, type MachineState, type Node } from './grammar.js';

/** A node with the configuration to return to at the end of its rule; null ends the text. */
export class Configuration {
  readonly id: number;
  readonly node: Node;
  /** The state of the node's machine; '' without one. */
  readonly state: MachineState;
  readonly parent: Configuration | null;
  /** Number of bytes of the shortest end of the text. */
  readonly closeBytes: number;
  readonly children = new Map<number | string, Configuration>();
  readonly #close: string;

  constructor(id: number, node: Node, state: MachineState, parent: Configuration | null) {
    this.id = id;
    this.node = node;
    this.state = state;
    this.parent = parent;
    this.#close = (node.machine?.close(state) ?? '') + node.close;
    this.closeBytes = this.#close.length + (parent?.closeBytes ?? 0);
  }

  /** The shortest end of the text. */
  close(): string {
    let text = '';
    for (let at: Configuration | null = this; at; at = at.parent) text += at.#close;
    return text;
  }
}

export interface State {
  /** Configurations that read a byte. */
  readonly configurations: readonly Configuration[];
  /** Whether the text may end here. */
  readonly isEnd: boolean;
  /** By byte: the next state, null if there is none, undefined if not computed yet. */
  next: (State | null | undefined)[];
  /** Fewest tokens that end the text; -1 if not computed yet. */
  fewestTokens: number;
}

/** Limit of the states of one text, and of those that are kept for further texts. */
const MAX_STATES = 4096;
const MAX_KEPT = 2 ** 14;
/** Ways to read a text that are followed: of more, those that can end soonest. The text is a document in any case. */
const MAX_CONFIGURATIONS = 2000;

export class States {
  readonly #outermost = new Map<number | string, Configuration>();
  readonly #states = new Map<string, State>();
  #lastId = 0;
  #size = 0;

  /** The state before the first byte of a rule. */
  start(rule: Node): State {
    return this.inside(rule, rule.machine?.start ?? '');
  }

  /** A state inside a rule whose end is the end of the text. */
  inside(node: Node, state: MachineState): State {
    return this.of([this.#configuration(node, state, null)]);
  }

  /** The state of these configurations. */
  of(kernel: readonly Configuration[]): State {
    const seen = new Set<Configuration>();
    const found: Configuration[] = [];
    const queue = [...kernel];
    let isEnd = false;
    const add = (node: Node, parent: Configuration | null) => {
      // A value that cannot end is never begun.
      if (node.close !== null) queue.push(this.#configuration(node, node.machine?.start ?? '', parent));
    };
    for (let at = queue.pop(); at; at = queue.pop()) {
      if (seen.has(at)) continue;
      seen.add(at);
      const { node, state, parent } = at;
      if (node.edges.length > 0 || node.machine) found.push(at);
      if (node.isEnd) {
        if (parent) queue.push(parent);
        else isEnd = true;
      }
      if (!node.machine || node.machine.isEnd(state)) for (const to of node.empty) add(to, parent);
      for (const { rule, after } of node.calls)
        if (rule.close !== null && after.close !== null)
          add(rule, this.#configuration(after, after.machine?.start ?? '', parent));
    }
    const kept = found.length > MAX_CONFIGURATIONS ? soonest(found) : found;
    kept.sort((a, b) => a.id - b.id);
    const key = `${isEnd}:${kept.map(({ id }) => id).join()}`;
    let state = this.#states.get(key);
    if (!state) {
      state = { configurations: kept, isEnd, next: [], fewestTokens: -1 };
      this.#states.set(key, state);
      this.#size += 1 + kept.length;
    }
    return state;
  }

  /** The state after one byte; null if it is not allowed. */
  step(state: State, byte: number): State | null {
    const known = state.next[byte];
    if (known !== undefined) return known;
    const kernel: Configuration[] = [];
    for (const { node, state: inner, parent } of state.configurations) {
      const moved = node.machine?.step(inner, byte) ?? null;
      if (moved !== null) kernel.push(this.#configuration(node, moved, parent));
      for (const { low, high, to } of node.edges)
        if (byte >= low && byte <= high && to.close !== null)
          kernel.push(this.#configuration(to, to.machine?.start ?? '', parent));
    }
    const next = kernel.length === 0 ? null : this.of(kernel);
    state.next[byte] = next;
    return next;
  }

  /** The state after some bytes; null if they are not allowed. */
  advance(state: State, bytes: string): State | null {
    let at: State | null = state;
    for (let i = 0; i < bytes.length && at; i++) at = this.step(at, bytes.charCodeAt(i));
    return at;
  }

  /** Whether a text should go on in a new instance, so that memory is bounded. */
  get isFull(): boolean {
    return this.#states.size >= MAX_STATES;
  }

  /** Whether they take too much memory to be kept when no text is in them. */
  get isHeavy(): boolean {
    return this.#size > MAX_KEPT;
  }

  /** A copy of a state of another instance, which other texts may go on to use. */
  adopt(state: State): State {
    const copy = ({ node, state, parent }: Configuration): Configuration =>
      this.#configuration(node, state, parent && copy(parent));
    return { ...state, configurations: state.configurations.map(copy), next: [] };
  }

  #configuration(node: Node, state: MachineState, parent: Configuration | null): Configuration {
    const siblings = parent ? parent.children : this.#outermost;
    const key = node.machine ? `${node.id}:${state}` : node.id;
    let found = siblings.get(key);
    if (!found) {
      this.#lastId += 1;
      found = new Configuration(this.#lastId, node, state, parent);
      siblings.set(key, found);
    }
    return found;
  }
}

/** Those that can end soonest, the one of `closeOf` among them. */
function soonest(configurations: readonly Configuration[]): Configuration[] {
  const best = closeOf({ configurations, isEnd: false });
  const rank = (one: Configuration) => (one.closeBytes === best.length && one.close() === best ? -1 : one.closeBytes);
  const ranks = new Map(configurations.map((one) => [one, rank(one)]));
  const order = (a: Configuration, b: Configuration) => ranks.get(a)! - ranks.get(b)! || inOrder(a, b);
  return [...configurations].sort(order).slice(0, MAX_CONFIGURATIONS);
}

/** An order that does not depend on ids. */
function inOrder(a: Configuration | null, b: Configuration | null): number {
  for (; a !== b && a && b; a = a.parent, b = b.parent) {
    if (a.node !== b.node) return a.node.id - b.node.id;
    if (a.state !== b.state) return a.state < b.state ? -1 : 1;
  }
  return a === b ? 0 : a ? 1 : -1;
}

/** The first in byte order of the shortest ends of the text. */
export function closeOf({ configurations, isEnd }: Pick<State, 'configurations' | 'isEnd'>): string {
  if (isEnd) return '';
  const least = closeBytes({ configurations, isEnd });
  let best: string | null = null;
  for (const configuration of configurations) {
    if (configuration.closeBytes > least) continue;
    const text = configuration.close();
    if (closesSooner(text, best)) best = text;
  }
  return best ?? '';
}

/** Number of its bytes. */
export function closeBytes({ configurations, isEnd }: Pick<State, 'configurations' | 'isEnd'>): number {
  if (isEnd) return 0;
  return configurations.reduce((least, one) => Math.min(least, one.closeBytes), Number.POSITIVE_INFINITY);
}
