/** A table of shades. The mouse or the arrow keys pick a cell, whose value is written below. */
import { useLayoutEffect, useRef, useState } from 'preact/hooks';
import { colour, useTheme } from './theme.js';

interface Props {
  readonly title: string;
  readonly note?: string;
  readonly rows: readonly string[];
  readonly columns: readonly string[];
  /** [row][column]; NaN is an empty cell. */
  readonly values: readonly (readonly number[])[];
  /** Values of the lightest and the darkest shade. */
  readonly scale: readonly [low: number, high: number];
  readonly format: (value: number) => string;
  readonly rowName: string;
  readonly columnName: string;
  /** Writes the values into the cells; for small tables. */
  readonly showValues?: boolean;
}

const MAX_ROW_HEIGHT = 26;
const LEFT = 44;
/** Height of the names below the columns of a small table. */
const COLUMN_NAMES = 20;

export function HeatMap(props: Props) {
  const { title, note, rows, columns, values, scale, format, rowName, columnName, showValues = false } = props;
  const theme = useTheme();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [cell, setCell] = useState<readonly [row: number, column: number] | null>(null);
  const rowHeight = showValues ? 34 : Math.max(6, Math.min(MAX_ROW_HEIGHT, Math.floor(260 / rows.length)));
  const height = rowHeight * rows.length + (showValues ? COLUMN_NAMES : 0);

  useLayoutEffect(() => {
    const element = canvas.current!;
    const draw = () => {
      const width = element.clientWidth;
      const ratio = devicePixelRatio;
      element.width = width * ratio;
      element.height = height * ratio;
      const ctx = element.getContext('2d')!;
      ctx.scale(ratio, ratio);
      paint(ctx, width, rowHeight, props, cell);
    };
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    return () => observer.disconnect();
  }, [props, cell, theme, height, rowHeight]);

  const pick = (event: MouseEvent) => {
    const box = canvas.current!.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left - LEFT) / (box.width - LEFT)) * columns.length);
    const row = Math.floor((event.clientY - box.top) / rowHeight);
    setCell(column >= 0 && row >= 0 && row < rows.length && column < columns.length ? [row, column] : null);
  };
  const onKey = (event: KeyboardEvent) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const [row, column] = cell ?? [0, columns.length - 1];
    const clamp = (value: number, length: number) => Math.min(length - 1, Math.max(0, value));
    setCell([clamp(row + move[0], rows.length), clamp(column + move[1], columns.length)]);
  };
  const value = cell ? values[cell[0]]?.[cell[1]] : undefined;
  return (
    <figure class="heat">
      <figcaption>
        <h3>{title}</h3>
        {note ? <p class="note">{note}</p> : null}
      </figcaption>
      <canvas
        ref={canvas}
        style={{ height: `${height}px` }}
        tabIndex={0}
        role="img"
        aria-label={`${title}: ${rows.length} by ${columns.length} cells from ${format(scale[0])} to ${format(scale[1])}. Arrow keys pick a cell.`}
        onMouseMove={pick}
        onMouseLeave={() => setCell(null)}
        onKeyDown={onKey}
      />
      <div class="heat-foot">
        <span>
          {columnName} {columns[0]}
          {columns.length > 1 ? ` to ${columns.at(-1)}` : ''}
        </span>
        <output>
          {cell && value !== undefined
            ? `${rowName} ${rows[cell[0]]} · ${columnName} ${columns[cell[1]]} · ${Number.isNaN(value) ? 'no value' : format(value)}`
            : ''}
        </output>
        <span class="ramp">
          {format(scale[0])}
          <i />
          {format(scale[1])}
        </span>
      </div>
    </figure>
  );
}

function paint(
  ctx: CanvasRenderingContext2D,
  width: number,
  rowHeight: number,
  { rows, columns, values, scale: [low, high], format, showValues }: Props,
  cell: readonly [number, number] | null,
): void {
  const [accent, empty, text, ink] = ['accent-rgb', 'grid', 'muted', 'ink'].map(colour);
  const cellWidth = (width - LEFT) / columns.length;
  const gap = cellWidth > 8 ? 1 : 0;
  ctx.clearRect(0, 0, width, rowHeight * rows.length + COLUMN_NAMES);
  ctx.font = '11px system-ui, sans-serif';
  ctx.textBaseline = 'middle';
  const every = Math.ceil(14 / rowHeight);
  rows.forEach((name, r) => {
    if (r % every === 0) {
      ctx.fillStyle = text;
      ctx.textAlign = 'right';
      ctx.fillText(name, LEFT - 8, (r + 0.5) * rowHeight);
    }
    columns.forEach((_, c) => {
      const value = values[r]?.[c];
      const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
      ctx.fillStyle = Number.isFinite(value) ? `rgba(${accent}, ${(0.06 + 0.94 * share).toFixed(3)})` : empty;
      // Whole pixels: fractions would leave stripes between the cells.
      const x = Math.round(LEFT + c * cellWidth);
      ctx.fillRect(x, r * rowHeight, Math.round(LEFT + (c + 1) * cellWidth) - x - gap, rowHeight - 1);
      if (showValues && Number.isFinite(value)) {
        ctx.fillStyle = share > 0.55 ? colour('surface') : ink;
        ctx.textAlign = 'center';
        ctx.fillText(format(value), x + cellWidth / 2, (r + 0.5) * rowHeight);
      }
    });
  });
  if (showValues) {
    ctx.fillStyle = text;
    ctx.textAlign = 'center';
    columns.forEach((name, c) => {
      ctx.fillText(name, LEFT + (c + 0.5) * cellWidth, rowHeight * rows.length + 11);
    });
  }
  if (!cell) return;
  ctx.strokeStyle = ink;
  ctx.lineWidth = 1.5;
  ctx.strokeRect(LEFT + cell[1] * cellWidth, cell[0] * rowHeight, Math.max(2, cellWidth - gap), rowHeight - 1);
}
