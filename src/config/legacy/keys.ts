/**
 * Earlier names of config keys and of their values, those of the PyTorch runbooks among them. They keep working in files, in
 * `--set`, in programs and in the config of a checkpoint. docs/reference/legacy-names.md lists them.
 */

/** Reads another key of the same file, command line or environment. */
type Other = (path: string) => unknown;

interface OldKey {
  /** The present key. */
  readonly key: string;
  /** The value that it gets; undefined leaves it unset. Values of a wrong type are passed on, for the schema to reject. */
  readonly value: (value: unknown, other: Other) => unknown;
  /** Wins where the same source also sets the present key: the old key was stronger. */
  readonly wins?: boolean;
  readonly note?: string;
}

const renamed = (key: string): OldKey => ({ key, value: (value) => value });

/** A switch whose `false` means `when` for the present key, and whose `true` asks for nothing. */
const unless = (key: string, when: unknown, note: string, wins = false): OldKey => ({
  key,
  value: (value) => (value === false ? when : value === true ? undefined : value),
  wins,
  note,
});

const FUSED = ['runtime.use_fa2', 'runtime.fa2_enabled', 'runtime.use_flash'];
const FUSED_BRANCHES = ['runtime.use_fa2_win', 'runtime.use_fa2_cmp'];
const FUSED_LENGTHS = ['runtime.fa2_min_len_win', 'runtime.fa2_min_len_cmp'];

/** The fused kernels compute all branches, so they serve only if neither of the two is switched off. */
const fused = (note?: string): OldKey => ({
  key: 'runtime.fused',
  value: (_, other) => {
    const whole = FUSED.map(other).filter((value) => value !== undefined);
    const general = whole.includes(false) ? false : whole[0];
    const branches = FUSED_BRANCHES.map((path) => other(path) ?? general);
    const wrong = [...whole, ...branches].find((value) => value !== undefined && typeof value !== 'boolean');
    if (wrong !== undefined) return wrong;
    if (branches.includes(false)) return false;
    return branches.every((value) => value === true) ? true : undefined;
  },
  ...(note !== undefined && { note }),
});

const fusedLength: OldKey = {
  key: 'runtime.fused_min_len',
  value: (_, other) => {
    const lengths = FUSED_LENGTHS.map(other).filter((value) => value !== undefined);
    const wrong = lengths.find((value) => typeof value !== 'number');
    if (wrong !== undefined) return wrong;
    return lengths.includes(-1) ? -1 : Math.max(...(lengths as number[]));
  },
  note: 'the larger of the two; -1 in either disables the fused kernels',
};

const branchNote = 'false for either branch disables the fused kernels, which compute all branches';

/** By old name, in the order of docs/reference/legacy-names.md. */
const OLD_KEYS: Readonly<Record<string, OldKey>> = {
  'data.fwe_doc_batch': renamed('data.doc_batch'),
  'data.fwe_prefetch': renamed('data.prefetch'),
  'data.fwe_queue': renamed('data.queue'),
  'data.fwe_warmup_batches': renamed('data.warmup_batches'),
  'data.fwe_warmup_timeout': renamed('data.warmup_timeout'),
  'runtime.use_fa2': fused(),
  'runtime.fa2_enabled': fused(),
  'runtime.use_flash': fused(),
  'runtime.use_fa2_win': fused(branchNote),
  'runtime.use_fa2_cmp': fused(branchNote),
  'runtime.fa2_min_len_win': fusedLength,
  'runtime.fa2_min_len_cmp': fusedLength,
  'runtime.sel_v2_min_s': renamed('runtime.selection_v2_min_len'),
  'runtime.use_sel_pack': unless('runtime.selection_kernel', 'v1', 'false means v1; true changes nothing', true),
  'runtime.sdpa_audit': renamed('runtime.print_kernels'),
  'runtime.force_parity': renamed('runtime.reference_kernels'),
  'runtime.prefill_batched': unless('runtime.prefill_tile', 1, 'false means 1; true changes nothing', true),
  'runtime.tb': renamed('runtime.tensorboard'),
  'runtime.no_gc': {
    key: 'runtime.gradient_checkpointing',
    value: (value) => (value === true ? false : value === false ? undefined : value),
    note: 'true means false; false changes nothing',
  },
};

/** Earlier values, by present key. */
const OLD_VALUES: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  'data.source': { fineweb_edu: 'hub', fineweb_edu_local: 'files' },
};

/** Keys of the PyTorch system without a counterpart: errors with a hint. */
const RETIRED: Readonly<Record<string, string>> = {
  'runtime.use_triton_sel': 'Triton is not used; set runtime.selection_kernel',
  'runtime.sel_triton_min_L':
    'Triton is not used; runtime.selection_v2_min_len is the threshold of the selection kernels',
  'runtime.compile_cmp_win': 'there is no counterpart; remove the key',
};

/** Rows of docs/reference/legacy-names.md. */
export const oldKeys: readonly { name: string; key: string; note: string }[] = Object.entries(OLD_KEYS).map(
  ([name, { key, note = '' }]) => ({ name, key, note }),
);
export const oldValues: readonly { key: string; name: string; value: string }[] = Object.entries(OLD_VALUES).flatMap(
  ([key, names]) => Object.entries(names).map(([name, value]) => ({ key, name, value })),
);

const own = <Value>(table: Readonly<Record<string, Value>>, name: string): Value | undefined =>
  Object.hasOwn(table, name) ? table[name] : undefined;

/** The present name of a key; any other name is returned as it is. */
export function presentKey(path: string): string {
  return own(OLD_KEYS, path)?.key ?? path;
}

/** The hint for a retired key; undefined for any other. */
export function retiredKey(path: string): string | undefined {
  return own(RETIRED, path);
}

function presentValue(key: string, value: unknown): unknown {
  const names = own(OLD_VALUES, key);
  return (typeof value === 'string' && names && own(names, value)) || value;
}

interface Valued {
  readonly value: unknown;
  /** The earlier name that was written: of the key, or of the value. */
  readonly written?: string;
}

/**
 * The settings of one source (a file, a command line, the environment) under their present names. `onContradiction` is
 * called with two names that were given different values for one key; without it the later one counts.
 */
export function withPresentNames<Item extends Valued>(
  given: ReadonlyMap<string, Item>,
  onContradiction?: (path: string, earlier: string) => void,
): Map<string, Item> {
  const other: Other = (path) => given.get(path)?.value;
  const wins = (path: string) => Number(own(OLD_KEYS, path)?.wins ?? false);
  const found = new Map<string, Item>();
  const sources = new Map<string, string>();
  for (const [path, item] of [...given].sort(([a], [b]) => wins(a) - wins(b))) {
    const old = own(OLD_KEYS, path);
    const key = old?.key ?? path;
    const value = presentValue(key, old ? old.value(item.value, other) : item.value);
    if (old && value === undefined) continue;
    const earlier = sources.get(key);
    if (earlier !== undefined && found.get(key)?.value !== value && !old?.wins) onContradiction?.(path, earlier);
    const written = old ? path : value === item.value ? undefined : String(item.value);
    sources.set(key, path);
    found.set(key, written === undefined ? item : { ...item, value, written });
  }
  return found;
}

function isMapping(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** A config as a plain object, such as that of a checkpoint, under present names. What has no old name is not touched. */
export function withPresentNamesIn(config: unknown): unknown {
  if (!isMapping(config)) return config;
  const given = new Map<string, Valued>();
  for (const [section, keys] of Object.entries(config))
    if (isMapping(keys)) for (const [name, value] of Object.entries(keys)) given.set(`${section}.${name}`, { value });
  const isOld = ([path, { value }]: [string, Valued]) =>
    own(OLD_KEYS, path) !== undefined || presentValue(path, value) !== value;
  if (![...given].some(isOld)) return config;
  const present = [...withPresentNames(given)];
  return Object.fromEntries(
    Object.entries(config).map(([section, keys]) => {
      if (!isMapping(keys)) return [section, keys];
      const own = present.filter(([path]) => path.startsWith(`${section}.`));
      return [section, Object.fromEntries(own.map(([path, { value }]) => [path.slice(section.length + 1), value]))];
    }),
  );
}
