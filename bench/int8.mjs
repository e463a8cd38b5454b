// Costs of 8-bit weights on the CPU: the loss of a text, the most probable next token and the selected blocks, beside the
// weights of the file.
//
//   npm run build
//   node bench/int8.mjs TEXT MODEL... [--tokens 8192] [--length 1024]
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { openDevice } from '../dist/device/open.js';
import { loadModel } from '../dist/infer/load.js';
import { PackedMatrix } from '../dist/ops/linear/packed.js';
import { Tape } from '../dist/tensor/tape.js';

const { values, positionals } = parseArgs({
  options: { tokens: { type: 'string', default: '8192' }, length: { type: 'string', default: '1024' } },
  allowPositionals: true,
});
const [file, ...models] = positionals;
if (models.length === 0) {
  console.error('usage: int8.mjs TEXT MODEL... [--tokens 8192] [--length 1024]');
  process.exit(2);
}
const text = readFileSync(file, 'utf8');
const device = openDevice('cpu');

/** Loss, the argmax after each token and the blocks selected by each, in passes of `--length` tokens. */
function read(path, weights) {
  const { model, tokenizer } = loadModel(device, path, 'f32', { weights });
  const ids = Array.from(tokenizer.encode(text)).slice(0, Number(values.tokens));
  const [losses, best, selected] = [[], [], []];
  for (let at = 0; at + 1 < ids.length; at += Number(values.length)) {
    const part = ids.slice(at, at + Number(values.length));
    const tape = new Tape(device, { record: false });
    const observer = { selected: (_, blocks) => selected.push([blocks.shape.at(-1), blocks.read()]) };
    const context = { lengths: [part.length], ...(model.shape.attention === 'nsa' && { observer }) };
    const rows = part.map((_, i) => i);
    const logits = model.logits(tape, tape.from(part, [part.length], 'i32'), rows, context).read();
    const width = model.shape.vocabSize;
    part.forEach((_, i) => {
      const row = logits.subarray(i * width, (i + 1) * width);
      const top = row.reduce((most, value) => Math.max(most, value));
      best.push(row.indexOf(top));
      if (i + 1 < part.length)
        losses.push(top + Math.log(row.reduce((sum, value) => sum + Math.exp(value - top), 0)) - row[part[i + 1]]);
    });
    tape.end();
  }
  const bytes = model.parameters.reduce(
    (sum, { value }) => sum + (value instanceof PackedMatrix ? value.memory : value).bytes,
    0,
  );
  model.free();
  return { loss: losses.reduce((sum, loss) => sum + loss) / losses.length, best, selected, bytes };
}

/** Share of equal entries, and of the blocks of each row that the other row selected too. */
const agreement = (a, b) => a.filter((value, i) => value === b[i]).length / a.length;
function selection(a, b) {
  let [all, both] = [0, 0];
  a.forEach(([count, blocks], i) => {
    for (let at = 0; at < blocks.length; at += count) {
      const own = new Set([...blocks.subarray(at, at + count)].filter((block) => block >= 0));
      all += own.size;
      for (const block of b[i][1].subarray(at, at + count)) if (own.has(block)) both += 1;
    }
  });
  return all === 0 ? '–' : `${((100 * both) / all).toFixed(2)} %`;
}

console.log('| model | loss, file | loss, int8 | difference | same best token | same blocks | memory |');
console.log('|---|---|---|---|---|---|---|');
for (const path of models) {
  const [exact, rounded] = ['file', 'int8'].map((weights) => read(path, weights));
  const cells = [
    path,
    exact.loss.toFixed(4),
    rounded.loss.toFixed(4),
    `${(100 * (rounded.loss / exact.loss - 1)).toFixed(3)} %`,
    `${(100 * agreement(exact.best, rounded.best)).toFixed(2)} %`,
    selection(exact.selected, rounded.selected),
    `${(rounded.bytes / exact.bytes).toFixed(2)}`,
  ];
  console.log(`| ${cells.join(' | ')} |`);
}
