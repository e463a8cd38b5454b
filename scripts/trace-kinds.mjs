// Counts what the tokens of a trace of TypeScript sources read: node scripts/trace-kinds.mjs TRACE.safetensors
// For every layer and group, and each kind of line: the share of the selected blocks that are of the same kind as the
// token, beside the share that blocks chosen at random would have. Blocks that every token reads are left out.
import { dirname, join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const { openSafetensors } = await import(pathToFileURL(join(root, 'dist/run/safetensors.js')).href);
const KINDS = ['import', 'comment', 'member', 'other'];
/** Tokens before this one have too few blocks to choose from. */
const FIRST = 2048;

const file = openSafetensors(process.argv[2]);
const read = (name) => {
  const { begin, end } = file.entry(name);
  const bytes = new Uint8Array(end - begin);
  file.readInto(name, bytes);
  return bytes.buffer;
};
const [layers, tokens, groups, slots] = file.entry('selected').shape;
const size = Number(file.metadata['l_sel']);
const selected = new Int16Array(read('selected'));
const bytes = Buffer.from(read('pieces'));
const ends = new Int32Array(read('piece_ends'));

/** The kind of the line that each byte is in. */
function kindsOfBytes() {
  const kinds = [];
  let isImport = false;
  for (const line of bytes.toString('latin1').split('\n')) {
    const text = line.trim();
    isImport ||= text.startsWith('import ');
    const isComment = /^(\/\*\*|\*|\/\/)/.test(text);
    const kind = isImport ? 'import' : isComment ? 'comment' : text.startsWith('readonly ') ? 'member' : 'other';
    if (text.includes(" from '")) isImport = false;
    for (let i = 0; i <= line.length; i++) kinds.push(kind);
  }
  return kinds;
}

const byByte = kindsOfBytes();
const kindOf = Array.from({ length: tokens }, (_, i) => byByte[i === 0 ? 0 : ends[i - 1]]);
/** [block]: share of its tokens of a kind; and the sums over the blocks before. */
const share = (kind) =>
  Array.from({ length: Math.ceil(tokens / size) }, (_, block) => {
    const own = kindOf.slice(block * size, (block + 1) * size);
    return own.filter((one) => one === kind).length / own.length;
  });
const columns = Array.from({ length: layers * groups }, (_, i) => `${Math.floor(i / groups)}.${i % groups}`);
console.log(['kind', 'random', ...columns].map((text) => text.padStart(8)).join(''));
for (const kind of KINDS) {
  const shares = share(kind);
  const sums = [0];
  for (const value of shares) sums.push(sums[sums.length - 1] + value);
  const found = columns.map(() => ({ same: 0, random: 0, count: 0 }));
  for (let token = FIRST; token < tokens; token++) {
    if (kindOf[token] !== kind) continue;
    const own = Math.floor(token / size);
    for (let column = 0; column < found.length; column++) {
      const [layer, group] = [Math.floor(column / groups), column % groups];
      const first = ((layer * tokens + token) * groups + group) * slots;
      for (const block of selected.subarray(first, first + slots)) {
        // The first block, the own one and the one before are always read.
        if (block <= 0 || block >= own - 1) continue;
        found[column].same += shares[block];
        found[column].random += (sums[own - 1] - sums[1]) / (own - 2);
        found[column].count += 1;
      }
    }
  }
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  const random = found.reduce((sum, one) => sum + one.random, 0) / found.reduce((sum, one) => sum + one.count, 0);
  const cells = [kind, percent(random), ...found.map(({ same, count }) => percent(same / count))];
  console.log(cells.map((text) => text.padStart(8)).join(''));
}
