/**
 * Earlier names of shipped configs, those of the PyTorch runbooks among them. Each has the settings that its file had:
 * runs go on in the folder in which they began.
 */

export interface OldConfig {
  /** The present name. */
  readonly config: string;
  /** Values that differ from the present file, by key. */
  readonly sets: Readonly<Record<string, unknown>>;
}

const inFolder = (config: string, folder: string, sets: OldConfig['sets'] = {}): OldConfig => ({
  config,
  sets: { ...sets, 'train.out_dir': `artifacts/${folder}` },
});

const OLD_CONFIGS: Readonly<Record<string, OldConfig>> = {
  m7c_125m_24g: inFolder('125m_24g', 'm7c_125m'),
  m7c_125m_40g: inFolder('125m_40g', 'm7c_125m'),
  m7c_125m_80g: inFolder('125m_80g', 'm7c_125m'),
  m7c_125m_1m: inFolder('125m_1m', 'm7c_125m_1m'),
  m7c_125m_fast_log: inFolder('125m_fast_log', 'm7c_125m'),
  m7c_125m_2k_test: inFolder('125m_2k_test', 'm7c_125m_2k_test'),
  m7c_125m_1xa100_production: inFolder('125m_1xa100_production', 'm7c_125m_1xa100_prod'),
  m7c_125m_2xa100_production: inFolder('125m_2xa100_production', 'm7c_125m_2xa100_prod'),
  runbook_s512: inFolder('125m_2xa100_production', 'runbook_s512', { 'train.seq_len': 512 }),
  runbook_s1024: inFolder('125m_2xa100_production', 'runbook_s1024', { 'train.seq_len': 1024 }),
  runbook_s2048: inFolder('125m_2xa100_production', 'runbook_s2048'),
  runbook_prod_2048: inFolder('125m_1xa100_production', 'runbook_prod_2048'),
  m7c_small_smoke: { config: 'small_smoke', sets: {} },
  train_showcase: inFolder('toy', 'train_showcase'),
};

/** Rows of docs/reference/legacy-names.md. */
export const oldConfigs: readonly ({ name: string } & OldConfig)[] = Object.entries(OLD_CONFIGS).map(([name, old]) => ({
  name,
  ...old,
}));

/** The config with this earlier name, given as `NAME` or `configs/NAME.yaml`. */
export function findOldConfig(typed: string): ({ name: string } & OldConfig) | undefined {
  const name = /^(?:\.\/)?configs\/(\w+)\.yaml$/.exec(typed)?.[1] ?? typed;
  return oldConfigs.find((old) => old.name === name);
}
