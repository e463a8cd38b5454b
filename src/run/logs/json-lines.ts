/** attention.jsonl and samples.jsonl: one JSON object per line, with the time it was written. */
import { toJson } from '../json.js';
import { AppendFile, LogWriter, type WriterOptions } from './log-file.js';

export class JsonLinesWriter extends LogWriter {
  constructor(path: string, options: WriterOptions = {}) {
    super(new AppendFile(path), options);
  }

  /** `ts` of the line is in seconds since 1970. */
  write(step: number, record: object): void {
    this.put(Buffer.from(`${toJson({ step, ts: Date.now() / 1000, ...record })}\n`));
  }
}
