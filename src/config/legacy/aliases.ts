/**
 * Names from the runbooks of the system Trefoil follows. Some are second names of a key: two keys for one switch could
 * disagree, so the config knows one. Others belonged to machinery that is not here and are refused with the way to go.
 */

interface Alias {
  key: string;
  /** undefined: the old name at this value leaves the key alone. */
  convert: (value: unknown) => unknown;
}

const same = (value: unknown) => value;

const ALIASES: Readonly<Record<string, Alias>> = {
  'runtime.use_flash': { key: 'runtime.use_fa2', convert: same },
  'runtime.fa2_enabled': { key: 'runtime.use_fa2', convert: same },
  'runtime.no_gc': {
    key: 'runtime.gradient_checkpointing',
    // "not off" is no wish to have it on: no_gc: false leaves the choice where it was. Anything else is the schema's to refuse.
    convert: (value) => (value === true ? false : value === false ? undefined : value),
  },
};

const RETIRED: Readonly<Record<string, string>> = {
  'runtime.use_triton_sel': 'no Triton here; choose with runtime.selection_kernel',
  'runtime.sel_triton_min_L': 'no Triton here; runtime.sel_v2_min_s is the threshold of the selection kernels',
  'runtime.compile_cmp_win': 'nothing is compiled by hand here; remove the key',
};

export const aliasNames: readonly string[] = Object.keys(ALIASES);

export function applyAlias(path: string, value: unknown): { path: string; value: unknown } | undefined {
  const alias = Object.hasOwn(ALIASES, path) ? ALIASES[path] : undefined;
  return alias === undefined ? undefined : { path: alias.key, value: alias.convert(value) };
}

/** Why a key of the old system is gone, if it was one. */
export function retiredKey(path: string): string | undefined {
  return Object.hasOwn(RETIRED, path) ? RETIRED[path] : undefined;
}
