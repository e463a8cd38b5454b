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

const MAX_NODES = 100_000;
/** Steps of finding how nodes end, and of checking them: under half a second. */
const MAX_STEPS = 2_000_000;
/** Nodes that may read the next byte at one place. */
const MAX_ALTERNATIVES = 2000;
/** Bytes of the shortest text of a grammar. */
const MAX_CLOSE = 2 ** 20;
/** A part of a text that is known from the ends of other nodes. */
interface Candidate {
  readonly node: Node;
  /** The text; null while the end of a node in it is not known. */
  text(): string | null;
}

/** Builds the nodes of one grammar. */
export class GrammarBuilder {
  readonly nodes: Node[] = [];
  #steps = 0;

  node({ machine = null, isText = machine !== null, isEnd = false }: Partial<Node> = {}): Node {
    if (this.nodes.length >= MAX_NODES) throw new UsageError('the schema is too large; reduce maxItems or repetitions');
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

  /**
   * Adds texts from `from`, each to a node. Common beginnings are one path, so that no place has as many ways as there are
   * texts.
   */
  literals(from: Node, texts: Iterable<readonly [text: string, to: Node]>): void {
    const next = new Map<Node, Map<number, Node>>();
    for (const [text, to] of texts) {
      let at = from;
      for (let i = 0; i < text.length; i++) {
        const byte = text.charCodeAt(i);
        const known = next.get(at) ?? new Map<number, Node>();
        next.set(at, known);
        const node = known.get(byte) ?? this.literal(at, text[i]);
        known.set(byte, node);
        at = node;
      }
      if (!at.empty.includes(to)) at.empty.push(to);
    }
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
    this.#expectFewAlternatives();
  }

  #step(): void {
    this.#steps += 1;
    if (this.#steps > MAX_STEPS) throw new UsageError('the schema is too large; reduce its options or repetitions');
  }

  /** Shortest ends first: a candidate is tried again only when a node in it ends sooner than known before. */
  #closeAll(): void {
    const dependents = this.nodes.map((): Candidate[] => []);
    for (const node of this.nodes) {
      for (const { low, to } of node.edges) {
        const byte = String.fromCharCode(low);
        dependents[to.id].push({ node, text: () => joined(byte, startClose(to)) });
      }
      for (const to of node.empty) dependents[to.id].push({ node, text: () => startClose(to) });
      for (const { rule, after } of node.calls) {
        const candidate = { node, text: () => joined(startClose(rule), startClose(after)) };
        dependents[rule.id].push(candidate);
        dependents[after.id].push(candidate);
      }
    }
    const byLength: Node[][] = [this.nodes.filter(({ isEnd }) => isEnd)];
    for (const node of byLength[0]) node.close = '';
    for (let length = 0; length < byLength.length; length++) {
      const queue = byLength[length] ?? [];
      for (let node = queue.pop(); node; node = queue.pop())
        for (const candidate of dependents[node.id]) {
          this.#step();
          const text = candidate.text();
          if (text === null || !closesSooner(text, candidate.node.close)) continue;
          if (text.length > MAX_CLOSE) throw new UsageError('the shortest document of the schema is over 1 MiB');
          candidate.node.close = text;
          const at = Math.max(length, text.length);
          byLength[at] ??= [];
          byLength[at].push(candidate.node);
        }
    }
  }

  #expectProgress(): void {
    const rules = new Set(this.nodes.flatMap(({ calls }) => calls.map(({ rule }) => rule)));
    for (const rule of rules) {
      const isCyclic = this.#reach(rule, (node) => {
        const next = node.machine && !node.machine.isEnd(node.machine.start) ? [] : [...node.empty];
        for (const call of node.calls) next.push(call.rule, ...(call.rule.close === '' ? [call.after] : []));
        return next;
      }).includes(rule);
      if (isCyclic) throw new UsageError('the schema refers to itself without an object or array between');
    }
  }

  /** Refuses what would make every step of a text slow. */
  #expectFewAlternatives(): void {
    for (const { edges } of this.nodes)
      for (const { to } of edges)
        if (to.empty.length + to.calls.length > 0)
          this.#reach(to, ({ empty, calls }) => [...empty, ...calls.map(({ rule }) => rule)], MAX_ALTERNATIVES);
  }

  /** Nodes that are reached from `start` by `next`, which throws beyond `most`. `start` is one only if it reaches itself. */
  #reach(start: Node, next: (node: Node) => readonly Node[], most = Number.POSITIVE_INFINITY): readonly Node[] {
    const seen = new Set<Node>();
    const queue = [start];
    for (let node = queue.pop(); node; node = queue.pop())
      for (const one of next(node)) {
        this.#step();
        if (seen.has(one)) continue;
        seen.add(one);
        queue.push(one);
        if (seen.size > most)
          throw new UsageError(`the schema allows more than ${most} alternatives at one place; reduce them`);
      }
    return [...seen];
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

function joined(first: string | null, second: string | null): string | null {
  return first === null || second === null ? null : first + second;
}
