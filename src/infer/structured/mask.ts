/** The token mask of one structured text: what a grammar allows, within a number of tokens. */
import type { TokenMask } from '../engine/request.js';
import type { Grammar } from './schema.js';
import { type Configuration, closeBytes, closeOf, type State, States } from './states.js';
import type { TokenTree } from './vocabulary.js';

/** Tokens that stay inside a rule, and the nodes of the tree at which the rule may end. */
interface InnerTokens {
  /** One bit per token. */
  readonly allowed: Uint32Array;
  readonly exits: readonly number[];
}

/** Tokens that a configuration allows: a shared set of bits, and further ones. */
interface AllowedTokens {
  readonly shared: Uint32Array | null;
  readonly more: Int32Array;
}

/** States and allowed tokens that the masks of one grammar found, shared with later masks. */
class MaskCache {
  readonly states = new States();
  readonly #allowed = new Map<Configuration, AllowedTokens>();
  #tokens = 0;

  get isHeavy(): boolean {
    return this.states.isHeavy || this.#tokens > MAX_KEPT_TOKENS;
  }

  allowed(configuration: Configuration, find: () => AllowedTokens): AllowedTokens {
    let allowed = this.#allowed.get(configuration);
    if (!allowed) {
      allowed = find();
      this.#allowed.set(configuration, allowed);
      this.#tokens += allowed.more.length;
    }
    return allowed;
  }
}

/** By grammar. */
export type MaskCaches = Map<Grammar, MaskCache>;

const MAX_INNER = 512;
/** Tokens of the configurations that are kept when no text is in them. */
const MAX_KEPT_TOKENS = 2 ** 19;
/** Configurations whose tokens are found for each, and kept. */
const FEW = 8;

/** Shared by all texts of one vocabulary: the tokens that are allowed inside strings. */
export class InnerTokenCache {
  readonly tree: TokenTree;
  readonly #byKey = new Map<string, InnerTokens>();

  constructor(tree: TokenTree) {
    this.tree = tree;
  }

  /** `grammar` keeps what other grammars cannot share. */
  of({ node, state }: Configuration, grammar: Map<string, InnerTokens>): InnerTokens {
    const shared = node.machine?.sharedKey(state, this.tree.longest) ?? null;
    const [cache, key] = shared === null ? [grammar, `${node.id}:${state}`] : [this.#byKey, shared];
    let inner = cache.get(key);
    if (!inner) {
      if (cache.size >= MAX_INNER) cache.clear();
      inner = this.#compute(new States(), { node, state });
      cache.set(key, inner);
    }
    return inner;
  }

  #compute(states: States, top: Pick<Configuration, 'node' | 'state'>): InnerTokens {
    const allowed = new Uint32Array(Math.ceil(this.tree.size / 32));
    const exits: number[] = [];
    walk(this.tree, states, 0, states.inside(top.node, top.state), (token, state, node) => {
      if (token >= 0) allowed[token >>> 5] |= 1 << (token & 31);
      else if (state.isEnd) exits.push(node);
    });
    return { allowed, exits };
  }
}

/**
 * Visits the nodes below `root` whose bytes the state allows, and their tokens: first the node with token -1, then each of
 * its tokens.
 */
function walk(
  tree: TokenTree,
  states: States,
  root: number,
  start: State,
  visit: (token: number, state: State, node: number) => void,
): void {
  const { byte, depth, skip, first, tokens } = tree;
  const base = depth[root];
  const path: State[] = [start];
  for (let node = root + 1; node < skip[root]; ) {
    const level = depth[node] - base;
    const before = path[level - 1];
    const known = before.next[byte[node]];
    const state = known === undefined ? states.step(before, byte[node]) : known;
    if (state === null) {
      node = skip[node];
      continue;
    }
    path[level] = state;
    visit(-1, state, node);
    for (let i = first[node]; i < first[node + 1]; i++) visit(tokens[i], state, node);
    node += 1;
  }
}

export interface MaskOptions {
  readonly grammar: Grammar;
  /** Tokens inside strings of this grammar that other grammars cannot share. */
  readonly grammarInner: Map<string, InnerTokens>;
  readonly inner: InnerTokenCache;
  readonly caches: MaskCaches;
  /** Tokens that end a text. */
  readonly endTokens: readonly number[];
  /** Most tokens of the text. */
  readonly budget: number;
  /** Special tokens that may be drawn where the grammar has their text, outside of strings. */
  readonly specials?: ReadonlyMap<number, string>;
  /** Bytes that are written already. */
  readonly written?: string;
}

const NO_SPECIALS: ReadonlyMap<number, string> = new Map();

/** Fewest tokens from a state to the end of the text. */
function fewestTokens(tree: TokenTree, state: State): number {
  if (state.fewestTokens < 0) state.fewestTokens = tree.fewestTokens(closeOf(state));
  return state.fewestTokens;
}

/** The written bytes of a mask do not begin a text of its grammar. */
export class NotInGrammar extends Error {}

export class StructuredMask implements TokenMask {
  readonly #options: MaskOptions;
  readonly #tree: TokenTree;
  readonly #hasAllBytes: boolean;
  readonly #specials: ReadonlyMap<number, string>;
  #cache: MaskCache;
  #state: State;
  #left: number;
  #isCut = false;

  constructor(options: MaskOptions) {
    this.#options = options;
    this.#tree = options.inner.tree;
    this.#hasAllBytes = this.#tree.hasAllBytes;
    this.#specials = options.specials ?? NO_SPECIALS;
    this.#cache = options.caches.get(options.grammar) ?? new MaskCache();
    options.caches.set(options.grammar, this.#cache);
    const start = this.#states.start(options.grammar.root);
    const state = this.#states.advance(start, options.written ?? '');
    if (!state) throw new NotInGrammar();
    this.#state = state;
    this.#left = options.budget;
  }

  get isConstrained(): boolean {
    return true;
  }

  /** Fewest tokens that end the text. */
  get fewestTokens(): number {
    return fewestTokens(this.#tree, this.#state);
  }

  get isComplete(): boolean {
    return this.#state.isEnd && this.#state.configurations.length === 0;
  }

  get isCut(): boolean {
    return this.#isCut;
  }

  apply(logits: Float32Array): void {
    const parts = this.#parts();
    const kept = parts.map(({ more }) => more);
    if (this.#state.isEnd) kept.push(Int32Array.from(this.#options.endTokens));
    if (this.#specials.size > 0) kept.push(this.#allowedSpecials());
    const values = kept.map((tokens) => Float32Array.from(tokens, (token) => logits[token]));
    forbid(
      logits,
      parts.flatMap(({ shared }) => (shared ? [shared] : [])),
    );
    for (const [i, tokens] of kept.entries())
      for (let at = 0; at < tokens.length; at++) logits[tokens[at]] = values[i][at];
  }

  narrow(token: number, logits: Float32Array): boolean {
    if (this.#fits(token)) return false;
    this.#isCut = true;
    const kept = [...this.#options.endTokens, ...this.#specials.keys()].filter((other) => this.#fits(other));
    walk(this.#tree, this.#states, 0, this.#state, (other, next) => {
      if (other >= 0 && this.#endsInTime(next)) kept.push(other);
    });
    const values = Float32Array.from(kept, (other) => logits[other]);
    logits.fill(Number.NEGATIVE_INFINITY);
    for (const [i, other] of kept.entries()) logits[other] = values[i];
    return true;
  }

  accept(token: number): void {
    if (this.#options.endTokens.includes(token)) return;
    const next = this.#after(token);
    if (!next) throw new Error(`token ${token} does not continue the structured text`);
    this.#state = next;
    this.#left -= 1;
    const { caches, grammar } = this.#options;
    // A full cache would be left by each text after its first token.
    if ((this.#cache.isHeavy || this.#states.isFull) && caches.get(grammar) === this.#cache) caches.delete(grammar);
    if (!this.#states.isFull) return;
    this.#cache = new MaskCache();
    this.#state = this.#states.adopt(next);
  }

  get #states(): States {
    return this.#cache.states;
  }

  #allowedSpecials(): Int32Array {
    if (this.#state.configurations.some(({ node }) => node.isText)) return new Int32Array();
    return Int32Array.from([...this.#specials.keys()].filter((token) => this.#after(token)));
  }

  #after(token: number): State | null {
    const bytes = this.#tree.bytes(token) ?? this.#specials.get(token) ?? null;
    return bytes === null ? null : this.#states.advance(this.#state, bytes);
  }

  /** Whether the text can still end within its tokens after this one. */
  #fits(token: number): boolean {
    if (this.#options.endTokens.includes(token)) return true;
    const next = this.#after(token);
    return next !== null && this.#endsInTime(next);
  }

  #endsInTime(next: State): boolean {
    // One token per byte is enough; the exact number is computed only where that is too many.
    if (this.#hasAllBytes && closeBytes(next) <= this.#left - 1) return true;
    return fewestTokens(this.#tree, next) <= this.#left - 1;
  }

  /** The tokens of each configuration. Many that no other state shares are walked together, which visits each token once. */
  #parts(): AllowedTokens[] {
    const { configurations } = this.#state;
    const isShared = ({ node, state }: Configuration) => node.machine?.sharedKey(state, this.#tree.longest) != null;
    const own = configurations.filter((configuration) => !isShared(configuration));
    if (own.length <= FEW) return configurations.map((configuration) => this.#tokens(configuration));
    const shared = configurations.filter(isShared).map((configuration) => this.#tokens(configuration));
    return [...shared, this.#walked(own)];
  }

  /** The tokens of a set of configurations are those of each. */
  #tokens(configuration: Configuration): AllowedTokens {
    return this.#cache.allowed(configuration, () =>
      configuration.node.isText ? this.#textTokens(configuration) : this.#walked([configuration]),
    );
  }

  #walked(configurations: readonly Configuration[]): AllowedTokens {
    const more: number[] = [];
    walk(this.#tree, this.#states, 0, this.#states.of(configurations), (token) => {
      if (token >= 0) more.push(token);
    });
    return { shared: null, more: Int32Array.from(more) };
  }

  /** Inside a string most tokens do not depend on what follows the string; only those beyond its end are walked. */
  #textTokens(configuration: Configuration): AllowedTokens {
    const { inner, grammarInner } = this.#options;
    const { allowed, exits } = inner.of(configuration, grammarInner);
    const more: number[] = [];
    const { parent } = configuration;
    if (parent) {
      const after = this.#states.of([parent]);
      for (const exit of exits)
        walk(this.#tree, this.#states, exit, after, (token) => {
          if (token >= 0) more.push(token);
        });
    }
    return { shared: allowed, more: Int32Array.from(more) };
  }
}

/** Forbids all tokens that none of the sets holds. */
function forbid(logits: Float32Array, sets: readonly Uint32Array[]): void {
  if (sets.length === 0) {
    logits.fill(Number.NEGATIVE_INFINITY);
    return;
  }
  for (let word = 0; word * 32 < logits.length; word++) {
    let bits = 0;
    for (const set of sets) bits |= set[word];
    const first = word * 32;
    for (let forbidden = ~bits; forbidden !== 0; forbidden &= forbidden - 1) {
      const token = first + 31 - Math.clz32(forbidden & -forbidden);
      if (token < logits.length) logits[token] = Number.NEGATIVE_INFINITY;
    }
  }
}
