/**
 * Files of a run, safetensors, models of the hub, and the ranks of a run on several processes.
 *
 * @packageDocumentation
 */

export type { Collectives, Reduction, Span, WireType } from '../device/collectives.js';
export type { Environment } from '../environment.js';
export { type PulledModel, type PullOptions, pullModel } from '../hub/pull.js';
export type { CheckpointState, FileDigest, Manifest } from '../run/checkpoint/read.js';
export { type FoundCheckpoint, findCheckpoint } from '../run/checkpoint/read.js';
export type { SavedCheckpoint, SaveOptions } from '../run/checkpoint/save.js';
export type { CsvContent, CsvRow } from '../run/logs/csv.js';
export { readCsv, TRAINING_CSV, VAL_CSV } from '../run/logs/csv.js';
export type {
  EndStatus,
  HeartbeatFields,
  HeartbeatMessage,
  HeartbeatMetrics,
  SectionName,
} from '../run/logs/heartbeat.js';
export { type Heartbeat, readHeartbeats } from '../run/logs/heartbeat.js';
export type { MetricName, NamedMetric, RunMetrics } from '../run/metrics.js';
export { type RunPaths, runPaths, writeHalt } from '../run/paths.js';
export type { WriteSafetensorsOptions } from '../run/safetensors.js';
export { readSafetensors, writeSafetensors } from '../run/safetensors.js';
export type { SafeDtype, SafeTensor } from '../run/safetensors-format.js';
export type { TensorToWrite } from '../run/tensor-source.js';
export type { SourceLoss } from '../train/evaluation.js';
export type { RankLauncher } from '../train/ranks/identity.js';
export { type RankIdentity, resolveRank } from '../train/ranks/identity.js';
export type { WatchedRun, WorldMember } from '../train/ranks/monitor.js';
export type { WorldOptions } from '../train/ranks/world.js';
export { openWorld, type World } from '../train/ranks/world.js';
