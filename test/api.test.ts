/** The surface of the library: exactly these names, each with a sentence in docs/reference/api.md. A change to it is deliberate. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import * as library from '../src/index.js';

const root = join(import.meta.dirname, '..');

const VALUES = [
  ...[
    'AdamW',
    'CpuDevice',
    'CudaDevice',
    'cudaAbsence',
    'DecodeCache',
    'ExitCode',
    'LanguageModel',
    'Parameter',
    'ParameterStore',
    'Sequences',
  ],
  ...['TRAINING_CSV', 'Tape', 'Tensor', 'TrefoilError', 'UsageError', 'VAL_CSV', 'add', 'attend', 'attendReference'],
  ...['benchAttention', 'benchLinear', 'benchTraining', 'checksFor', 'clipFactor', 'combine', 'compressAverage'],
  ...['compressConv', 'compressMlp', 'compressedAttention', 'createAttention', 'createLoader', 'createTokenizer'],
  ...['crossEntropy', 'crossEntropyLosses', 'denseAttention', 'embedding', 'estimateMemory', 'fillIntegers'],
  ...[
    'fillNormal',
    'fillUniform',
    'findCheckpoint',
    'gate',
    'gateStatistics',
    'generate',
    'generateAll',
    'gradientNorm',
    'linear',
  ],
  ...[
    'linearCrossEntropy',
    'loadModel',
    'measurePeak',
    'modelShape',
    'nativeSparseAttention',
    'openWorld',
    'parseConfig',
    'prefill',
  ],
  ...[
    'readCase',
    'readConfig',
    'readCsv',
    'readHeartbeats',
    'readSafetensors',
    'readTokens',
    'resolveRank',
    'rmsnorm',
    'rotate',
    'runPaths',
  ],
  ...['selectBlocks', 'selectedAttention', 'silu', 'sparseLayout', 'splitHeads', 'summarize', 'swiglu', 'train'],
  ...['trainCases', 'validateShapes', 'verifyDevice', 'windowAttention', 'writeFinalModel', 'writeHalt'],
  ...['writeSafetensors', 'HostStepper', 'NonFiniteStep', 'SourceFailed', 'Trainer'],
];

const TYPES = [
  ...['AttentionBench', 'AttentionContext', 'AttentionInputs', 'AttentionModule', 'AttentionOutput', 'AttentionRow'],
  ...[
    'Batch',
    'CachedSequence',
    'CaseChoice',
    'CaseFile',
    'CaseResult',
    'CheckpointRecord',
    'Config',
    'ConfigInput',
    'CpuOptions',
    'CudaOptions',
    'Device',
    'DeviceKind',
  ],
  ...[
    'Dtype',
    'EvaluationRecord',
    'FinishReason',
    'ForwardOptions',
    'FoundCheckpoint',
    'GateOptions',
    'GenerateOptions',
    'Generation',
  ],
  ...['HeadShape', 'Heartbeat', 'LoadedModel', 'Loader', 'LoaderOptions', 'MemoryEstimate', 'ModelShape', 'Observer'],
  ...[
    'RankIdentity',
    'RunPaths',
    'SamplingOptions',
    'SelectionKernel',
    'Shape',
    'SparseInputs',
    'SparseLayout',
    'SparseOutputs',
  ],
  ...[
    'SparseShape',
    'StepBudget',
    'StepRecord',
    'StepTime',
    'TextPiece',
    'Tokenizer',
    'TrainCase',
    'TrainOptions',
    'TrainResult',
  ],
  ...['TrainStatus', 'VerifyRow', 'VerifySummary', 'World'],
  ...['BatchSource', 'DeviceBatch', 'Evaluation', 'LossFunction', 'StepContext', 'StepInputs', 'Stepper', 'StepResult'],
  ...['TokenBatch', 'TrainableModel', 'TrainerOptions', 'TrainingStep'],
];

/** Types leave no trace at run time: their names are read from the source. */
function exportedTypes(): string[] {
  const source = readFileSync(join(root, 'src/index.ts'), 'utf8');
  return [...source.matchAll(/export (type )?\{([^}]*)\}/g)].flatMap(([, isType, names]) =>
    names
      .split(',')
      .map((name) => name.trim())
      .filter((name) => name !== '' && (isType !== undefined || name.startsWith('type ')))
      .map((name) => name.replace(/^type /, '').replace(/^.* as /, '')),
  );
}

describe('the library', () => {
  it('exports exactly these values', () => expect(Object.keys(library).sort()).toEqual([...VALUES].sort()));

  it('exports exactly these types', () => expect(exportedTypes().sort()).toEqual([...TYPES].sort()));

  it('exports nothing by a star, which would hide a new name', () => {
    expect(readFileSync(join(root, 'src/index.ts'), 'utf8')).not.toMatch(/export \*/);
  });
});

describe('docs/reference/api.md', () => {
  const page = readFileSync(join(root, 'docs/reference/api.md'), 'utf8');
  const rows = [...page.matchAll(/^\| `(\w+)` \| (.+) \|$/gm)].map(([, name, sentence]) => ({ name, sentence }));

  it('has one row for every name, and no other', () => {
    expect(rows.map(({ name }) => name).sort()).toEqual([...VALUES, ...TYPES].sort());
  });

  it('says something about each', () => {
    for (const { name, sentence } of rows) expect(sentence.length, name).toBeGreaterThan(5);
  });

  it('names every option of train', () => {
    const source = readFileSync(join(root, 'src/train/train.ts'), 'utf8');
    const [, body] = /export interface TrainOptions extends RunCallbacks \{([\s\S]*?)\n\}/.exec(source)!;
    const options = [...body.matchAll(/^ {2}readonly (\w+)\??:/gm)].map((match) => match[1]);
    const { sentence } = rows.find(({ name }) => name === 'TrainOptions')!;
    // How a checkpoint is written is a matter of tests.
    const missing = options.filter((name) => name !== 'saveOptions' && !sentence.includes(`\`${name}\``));
    expect(options.length).toBeGreaterThan(8);
    expect(missing).toEqual([]);
  });
});
