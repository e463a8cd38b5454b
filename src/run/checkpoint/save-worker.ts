/** The program of the thread that saves checkpoints. */
import { parentPort } from 'node:worker_threads';
import { serveSaves } from './save-tasks.js';

if (!parentPort) throw new Error('this module is the program of a worker thread');
serveSaves(parentPort);
