/**
 * Grammars over bytes: graphs of nodes whose edges read a byte or call a rule. A rule is named by its first node and ends
 * at a node with `isEnd`. Bytes are kept in strings, one character of 0 to 255 per byte.
 */
import { UsageError } from '../../errors.js';

/** Reads the bytes of one part of a text by a state of its own, where a graph would be too large. */
export interface Machine {
  /** The state before the first byte. States are compared by value. */
  readonly start: MachineState;
  /** The state after a byte; null if it is not allowed. */
  step(state: MachineState, byte: number): MachineState | null;
  /** Whether the part may end here. */
  isEnd(state: MachineState): boolean;
  /** The first in byte order of the shortest strings that lead to an end. */
  close(state: MachineState): string;
  /** Equal for states that allow the same tokens of up to `longest` bytes in every grammar; null if only within this one. */
  sharedKey(state: MachineState, longest: number): string | null;
}

export type MachineState = number | string;

/** A position in a rule. */
export interface Node {
  readonly id: number;
  readonly edges: { readonly low: number; readonly high: number; readonly to: Node }[];
  /** Nodes that are reached without a byte; from a node with a machine only where the machine may end. */
  readonly empty: Node[];
  /** Reads what `rule` describes, then continues at `after`. */
  readonly calls: { readonly rule: Node; readonly after: Node }[];
  isEnd: boolean;
  readonly machine: Machine | null;
  /** Inside a string, where most tokens are allowed. */
  readonly isText: boolean;
  /**
   * The first in byte order of the shortest strings from here to the end of the rule; null if there is none. With a
   * machine: from where the machine has ended.
   */
  close: string | null;
}

const MOST_NODES = 100_000;
/** Bytes of the shortest text of a grammar. */
const MOST_CLOSE = 2 ** 20;

/** Builds the nodes of one grammar. */
export class GrammarBuilder {
  readonly nodes: Node[] = [];

  node({ machine = null, isText = machine !== null, isEnd = false }: Partial<Node> = {}): Node {
    if (this.nodes.length >= MOST_NODES)
      throw new UsageError('the schema is too large; reduce maxItems or repetitions');
    const id = this.nodes.length;
    const node: Node = { id, edges: [], empty: [], calls: [], isEnd, machine, isText, close: null };
    this.nodes.push(node);
    return node;
  }

  /** Adds the bytes from `from` on; returns the node after them. */
  literal(from: Node, bytes: string, isText = false): Node {
    let at = from;
    for (let i = 0; i < bytes.length; i++) {
      const to = this.node({ isText });
      const byte = bytes.charCodeAt(i);
      at.edges.push({ low: byte, high: byte, to });
      at = to;
    }
    return at;
  }

  /** Adds a call of `rule`; returns the node after it. */
  call(from: Node, rule: Node): Node {
    const after = this.node();
    from.calls.push({ rule, after });
    return after;
  }

  /** Computes how every node ends. Throws if `root` has no text, or calls itself before a byte is read. */
  finish(root: Node): void {
    this.#closeAll();
    if (root.close === null)
      throw new UsageError('the schema allows no finite document: a value must contain itself, or bounds exclude all');
    this.#expectProgress();
  }

  /** Shortest ends first: a node is visited again only when one of its successors ends sooner than known before. */
  #closeAll(): void {
    const dependents = this.nodes.map((): Node[] => []);
    for (const node of this.nodes) {
      for (const { to } of node.edges) dependents[to.id].push(node);
      for (const to of node.empty) dependents[to.id].push(node);
      for (const { rule, after } of node.calls) {
        dependents[rule.id].push(node);
        dependents[after.id].push(node);
      }
    }
    const byLength: Node[][] = [this.nodes.filter(({ isEnd }) => isEnd)];
    for (let length = 0; length < byLength.length; length++) {
      const queue = byLength[length] ?? [];
      for (let node = queue.pop(); node; node = queue.pop()) {
        if (node.isEnd) node.close = '';
        for (const one of dependents[node.id]) {
          if (!improve(one)) continue;
          const at = Math.max(length, one.close!.length);
          byLength[at] ??= [];
          byLength[at].push(one);
        }
      }
    }
  }

  #expectProgress(): void {
    const rules = new Set(this.nodes.flatMap(({ calls }) => calls.map(({ rule }) => rule)));
    for (const rule of rules) {
      const seen = new Set<Node>();
      const queue = [rule];
      for (let node = queue.pop(); node; node = queue.pop()) {
        const next = node.machine && !node.machine.isEnd(node.machine.start) ? [] : [...node.empty];
        for (const call of node.calls) next.push(call.rule, ...(call.rule.close === '' ? [call.after] : []));
        if (next.includes(rule)) throw new UsageError('the schema refers to itself without an object or array between');
        for (const one of next) if (!seen.has(one)) queue.push(one);
        for (const one of next) seen.add(one);
      }
    }
  }
}

/** Whether `a` is shorter than `b`, or as long and earlier in byte order. */
export function closesSooner(a: string, b: string | null): boolean {
  return b === null || a.length < b.length || (a.length === b.length && a < b);
}

/** How a path ends that goes on at `node`, from its first state. */
function startClose(node: Node): string | null {
  if (node.close === null || !node.machine) return node.close;
  return node.machine.close(node.machine.start) + node.close;
}

function improve(node: Node): boolean {
  let best = node.isEnd ? '' : node.close;
  const offer = (text: string | null) => {
    if (text !== null && closesSooner(text, best)) best = text;
  };
  for (const { low, to } of node.edges) {
    const rest = startClose(to);
    if (rest !== null) offer(String.fromCharCode(low) + rest);
  }
  for (const to of node.empty) offer(startClose(to));
  for (const { rule, after } of node.calls) {
    const [inner, rest] = [startClose(rule), startClose(after)];
    if (inner !== null && rest !== null) offer(inner + rest);
  }
  if (best === node.close) return false;
  if (best !== null && best.length > MOST_CLOSE)
    throw new UsageError('the shortest document of the schema is over 1 MiB');
  node.close = best;
  return true;
}
