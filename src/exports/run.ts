/**
 * Files of a run, safetensors, and the ranks of a run on several processes.
 *
 * @packageDocumentation
 */

export { type RankIdentity, resolveRank } from '../ranks/identity.js';
export { openWorld, type World } from '../ranks/world.js';
export { type FoundCheckpoint, findCheckpoint } from '../run/checkpoint-find.js';
export { readCsv, TRAINING_CSV, VAL_CSV } from '../run/csv.js';
export { type Heartbeat, readHeartbeats } from '../run/heartbeat.js';
export { type RunPaths, runPaths, writeHalt } from '../run/run-folder.js';
export { readSafetensors, writeSafetensors } from '../run/safetensors.js';
