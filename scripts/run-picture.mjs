/**
 * The picture of the first run in the README: node scripts/run-picture.mjs artifacts/quickstart docs/images/first-run.svg
 *
 * Three panels from the files of the run: training and validation loss, recall with and without the selected branch, and the
 * blocks that each layer and group read to answer one question. Colours follow the reader's light or dark setting.
 */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';

const [folder, target] = process.argv.slice(2);
if (!target) {
  console.error('usage: node scripts/run-picture.mjs RUN_FOLDER PICTURE.svg');
  process.exit(2);
}

const WIDTH = 880;
const LOSS = { left: 56, right: 420, top: 64, bottom: 244 };
const RECALL = { left: 500, right: 856, top: 64, bottom: 244 };
const BLOCKS = { left: 150, right: 856, top: 364, row: 20 };

/** Rows of a CSV file with numbers, as objects by column. */
function readTable(name) {
  const [head, ...lines] = readFileSync(join(folder, name), 'utf8').trim().split('\n');
  const columns = head.split(',');
  return lines.map((line) => Object.fromEntries(line.split(',').map((value, i) => [columns[i], Number(value)])));
}

const round = (value) => Number(value.toFixed(1));
const escapeXml = (content) => String(content).replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
const text = (x, y, content, kind = '', anchor = 'start') =>
  `<text x="${round(x)}" y="${round(y)}" class="${kind}" text-anchor="${anchor}">${escapeXml(content)}</text>`;

function lossPanel() {
  const training = readTable('training.csv');
  const validation = readTable('val.csv');
  const lastStep = training.at(-1).step;
  const highest = Math.ceil(Math.max(...training.map(({ loss }) => loss)));
  const toX = (step) => LOSS.left + (step / lastStep) * (LOSS.right - LOSS.left);
  const toY = (loss) => LOSS.bottom - (loss / highest) * (LOSS.bottom - LOSS.top);
  const line = training.map(({ step, loss }, i) => `${i ? 'L' : 'M'}${round(toX(step))} ${round(toY(loss))}`).join('');
  const levels = Array.from({ length: highest + 1 }, (_, i) => i).filter((level) => level % 2 === 0);
  const last = validation.at(-1);
  return [
    text(LOSS.left, LOSS.top - 30, 'Loss', 'title'),
    text(LOSS.left + 44, LOSS.top - 30, 'training (line), validation (dots), by step', 'quiet'),
    ...levels.map(
      (level) =>
        `<path class="grid" d="M${LOSS.left} ${round(toY(level))}H${LOSS.right}"/>${text(LOSS.left - 10, toY(level) + 4, level, 'quiet', 'end')}`,
    ),
    ...[0, 0.5, 1].map((part) => text(toX(part * lastStep), LOSS.bottom + 20, part * lastStep, 'quiet', 'middle')),
    `<path class="curve" d="${line}"/>`,
    ...validation.map(
      ({ step, val_loss }) => `<circle class="dot" cx="${round(toX(step))}" cy="${round(toY(val_loss))}" r="4.5"/>`,
    ),
    text(toX(last.step) - 8, toY(last.val_loss) - 14, last.val_loss.toFixed(2), 'strong', 'end'),
  ];
}

function recallPanel({ rows }) {
  const slot = (RECALL.right - RECALL.left) / rows.length;
  const bar = slot * 0.34;
  const toY = (share) => RECALL.bottom - share * (RECALL.bottom - RECALL.top);
  const column = (x, share, kind) => [
    `<rect class="${kind}" x="${round(x)}" y="${round(toY(share))}" width="${round(bar)}" height="${round(RECALL.bottom - toY(share))}" rx="2"/>`,
    text(x + bar / 2, toY(share) - 6, Math.round(share * 100), kind === 'with' ? 'strong' : 'quiet', 'middle'),
  ];
  return [
    text(RECALL.left, RECALL.top - 30, 'Recall, %', 'title'),
    `<rect class="with" x="${RECALL.left + 86}" y="${RECALL.top - 40}" width="11" height="11" rx="2"/>`,
    text(RECALL.left + 102, RECALL.top - 30, 'all branches', 'quiet'),
    `<rect class="without" x="${RECALL.left + 186}" y="${RECALL.top - 40}" width="11" height="11" rx="2"/>`,
    text(RECALL.left + 202, RECALL.top - 30, 'selected branch off', 'quiet'),
    `<path class="grid" d="M${RECALL.left} ${RECALL.bottom}H${RECALL.right}"/>`,
    ...rows.flatMap(({ from, to, accuracy, accuracy_without_selected }, i) => {
      const middle = RECALL.left + slot * (i + 0.5);
      return [
        ...column(middle - bar - 2, accuracy, 'with'),
        ...column(middle + 2, accuracy_without_selected, 'without'),
        text(middle, RECALL.bottom + 20, `${from} to ${to - 1}`, 'quiet', 'middle'),
      ];
    }),
    text((RECALL.left + RECALL.right) / 2, RECALL.bottom + 40, 'tokens between fact and question', 'quiet', 'middle'),
  ];
}

function blocksPanel({ example }) {
  const { blocks_read, block_size, fact_token, question_token, thing, predicted } = example;
  const count = Math.floor(question_token / block_size) + 1;
  const factBlock = Math.floor(fact_token / block_size);
  const readers = blocks_read.flatMap((groups, layer) =>
    groups.map((blocks, group) => ({ name: `layer ${layer}, group ${group}`, blocks })),
  );
  const slot = (BLOCKS.right - BLOCKS.left) / count;
  const cell = (i, y, kind) =>
    `<rect class="${kind}" x="${round(BLOCKS.left + i * slot + 1)}" y="${y}" width="${round(slot - 2)}" height="${BLOCKS.row - 5}" rx="2"/>`;
  const bottom = BLOCKS.top + readers.length * BLOCKS.row;
  const factX = BLOCKS.left + factBlock * slot;
  return {
    bottom,
    parts: [
      text(LOSS.left, BLOCKS.top - 38, `“The ${thing}${predicted}.”`, 'title'),
      text(BLOCKS.right, BLOCKS.top - 38, `blocks of ${block_size} tokens read at the question`, 'quiet', 'end'),
      ...readers.flatMap(({ name, blocks }, row) => {
        const y = BLOCKS.top + row * BLOCKS.row;
        const kindOf = (i) => (!blocks.includes(i) ? 'unread' : i === factBlock ? 'found' : 'read');
        return [
          text(BLOCKS.left - 12, y + 12, name, 'quiet', 'end'),
          ...Array.from({ length: count }, (_, i) => cell(i, y, kindOf(i))),
        ];
      }),
      `<rect class="frame" x="${round(factX - 1)}" y="${BLOCKS.top - 4}" width="${round(slot + 2)}" height="${readers.length * BLOCKS.row + 3}" rx="3"/>`,
      text(factX + slot / 2, bottom + 18, `the fact, ${question_token - fact_token} tokens before`, 'strong', 'middle'),
      text(BLOCKS.right, bottom + 18, 'the question', 'quiet', 'end'),
    ],
  };
}

const recall = JSON.parse(readFileSync(join(folder, 'recall.json'), 'utf8'));
const blocks = blocksPanel(recall);
const height = blocks.bottom + 40;
const style = `
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 } .strong { font-weight: 600 } .quiet { fill: #57606a }
  .paper { fill: #fff } .grid { stroke: #d0d7de } .curve { fill: none; stroke: #0072b2; stroke-width: 2 }
  .dot { fill: #d55e00 } .with, .found { fill: #0072b2 } .without { fill: #b8c0c8 } .read { fill: #8fb8d4 }
  .unread { fill: #eef1f4 } .frame { fill: none; stroke: #d55e00; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9aa4af } .paper { fill: #0d1117 } .grid { stroke: #30363d }
    .curve { stroke: #56b4e9 } .dot { fill: #e69f00 } .with, .found { fill: #56b4e9 } .without { fill: #59636e }
    .read { fill: #2f5f80 } .unread { fill: #1b2129 } .frame { stroke: #e69f00 }
  }`;
writeFileSync(
  target,
  [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${height}" viewBox="0 0 ${WIDTH} ${height}" role="img">`,
    '<title>The first run: loss, recall by distance, and the blocks read to answer one question</title>',
    `<style>${style}\n</style>`,
    `<rect class="paper" width="${WIDTH}" height="${height}"/>`,
    ...lossPanel(),
    ...recallPanel(recall),
    ...blocks.parts,
    '</svg>\n',
  ].join('\n'),
);
