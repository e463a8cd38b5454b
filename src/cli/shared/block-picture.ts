/** A picture in the terminal of the blocks that one token read: a row for each layer and group, a column for each block. */
import type { BlocksRead } from '../../evaluate/recall.js';
import type { Styles } from './io.js';

export interface BlockPicture {
  readonly read: BlocksRead;
  /** The block of the token that reads; later ones do not exist for it. */
  readonly current: number;
  /** The block that holds what it needs. */
  readonly wanted: number;
  /** The first block that the window reaches. */
  readonly window: number;
}

const LABEL_WIDTH = 18;
/** Symbols of a block: chosen by its score, always read (first, previous and current), and not read. */
const [CHOSEN, ALWAYS, UNREAD] = ['█', '▒', '·'];

/** Lines of at most `width` columns. Blocks are drawn two columns wide where that fits, else one. */
export function blockPicture({ read, current, wanted, window }: BlockPicture, style: Styles, width = 80): string {
  const cell = LABEL_WIDTH + 2 * (current + 1) <= width ? 2 : 1;
  const blocks = Array.from({ length: current + 1 }, (_, block) => block);
  const isAlways = (block: number) => block === 0 || block >= current - 1;
  const symbol = (chosen: readonly number[], block: number): string => {
    if (!chosen.includes(block)) return style.dim(UNREAD.repeat(cell));
    if (block === wanted) return style.green(CHOSEN.repeat(cell));
    return isAlways(block) ? style.dim(ALWAYS.repeat(cell)) : style.yellow(CHOSEN.repeat(cell));
  };
  const row = (label: string, cells: readonly string[]) => `${label.padEnd(LABEL_WIDTH)}${cells.join('')}`.trimEnd();
  const mark = (of: (block: number) => boolean, sign: string) =>
    blocks.map((block) => (of(block) ? sign.repeat(cell) : ' '.repeat(cell)));
  return [
    ...read.flatMap((groups, layer) =>
      groups.map((chosen, group) =>
        row(
          `layer ${layer}, group ${group}`,
          blocks.map((block) => symbol(chosen, block)),
        ),
      ),
    ),
    row(
      'the fact',
      mark((block) => block === wanted, '▲'),
    ),
    row(
      'the window',
      mark((block) => block >= window, '─'),
    ),
  ].join('\n');
}
