/**
 * Config keys of the PyTorch system whose runbooks Trefoil follows. Aliases set a key of the schema under another name.
 * Retired keys have no counterpart and are errors with a hint.
 */

interface Alias {
  key: string;
  /** Returns the value for `key`; undefined leaves the key unset. */
  convert: (value: unknown) => unknown;
}

const same = (value: unknown) => value;

const ALIASES: Readonly<Record<string, Alias>> = {
  'runtime.use_flash': { key: 'runtime.use_fa2', convert: same },
  'runtime.fa2_enabled': { key: 'runtime.use_fa2', convert: same },
  'runtime.no_gc': {
    key: 'runtime.gradient_checkpointing',
    // `no_gc: false` does not request checkpointing. Values of another type are passed on, for the schema to reject.
    convert: (value) => (value === true ? false : value === false ? undefined : value),
  },
};

const RETIRED: Readonly<Record<string, string>> = {
  'runtime.use_triton_sel': 'Triton is not used; set runtime.selection_kernel',
  'runtime.sel_triton_min_L': 'Triton is not used; runtime.sel_v2_min_s is the threshold of the selection kernels',
  'runtime.compile_cmp_win': 'there is no counterpart; remove the key',
};

export const aliasNames: readonly string[] = Object.keys(ALIASES);

export function applyAlias(path: string, value: unknown): { path: string; value: unknown } | undefined {
  const alias = Object.hasOwn(ALIASES, path) ? ALIASES[path] : undefined;
  return alias === undefined ? undefined : { path: alias.key, value: alias.convert(value) };
}

/** The hint for a retired key; undefined for any other. */
export function retiredKey(path: string): string | undefined {
  return Object.hasOwn(RETIRED, path) ? RETIRED[path] : undefined;
}
