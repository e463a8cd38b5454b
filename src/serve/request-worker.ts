/** The thread in which bodies of requests are read (`RequestReader`): text becomes tokens, templates and schemas are tried. */
import { workerData } from 'node:worker_threads';
import { HttpError } from '../http/error.js';
import { answerTasks } from '../limited-worker.js';
import { parseBody } from './body.js';
import { type Job, PARSERS, servedModel } from './protocol.js';
import type { ReadAnswer, ReaderSettings, ReadTask } from './request-reader.js';

const { id, info, chatTemplate } = workerData as ReaderSettings;
const model = servedModel(id, info, chatTemplate);

answerTasks<ReadTask, ReadAnswer, Job>(({ kind, body }, note) => {
  try {
    const bytes = Buffer.from(body.buffer, body.byteOffset, body.byteLength);
    return { value: PARSERS[kind](parseBody(bytes), model, note) };
  } catch (error) {
    if (!(error instanceof HttpError)) throw error;
    const { status, message, detail } = error;
    return { refused: { status, message, detail } };
  }
});
