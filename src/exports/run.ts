/**
 * Files of a run, safetensors, and the ranks of a run on several processes.
 *
 * @packageDocumentation
 */

export type { Collectives, Reduction, Span, WireType } from '../device/collectives.js';
export type { Environment as EnvironmentVariables, Launcher as RankLauncher } from '../ranks/identity.js';
export { type RankIdentity, resolveRank } from '../ranks/identity.js';
export type { Member as WorldMember, Watched as WatchedRun } from '../ranks/monitor.js';
export type { WorldOptions } from '../ranks/world.js';
export { openWorld, type World } from '../ranks/world.js';
export { type FoundCheckpoint, findCheckpoint } from '../run/checkpoint-find.js';
export type { FileDigest, Manifest } from '../run/checkpoint-manifest.js';
export type { CheckpointState } from '../run/checkpoint-save.js';
export type { CsvContent, CsvRow } from '../run/csv.js';
export { readCsv, TRAINING_CSV, VAL_CSV } from '../run/csv.js';
export type { HeartbeatFields, HeartbeatMessage } from '../run/heartbeat.js';
export { type Heartbeat, readHeartbeats } from '../run/heartbeat.js';
export { type RunPaths, runPaths, writeHalt } from '../run/run-folder.js';
export type { TensorToWrite, WriteSafetensorsOptions } from '../run/safetensors.js';
export { readSafetensors, writeSafetensors } from '../run/safetensors.js';
export type { SafeDtype, SafeTensor } from '../run/safetensors-dtype.js';
