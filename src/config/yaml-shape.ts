/**
 * The shape of YAML, looked at before it is parsed: cards of datasets and configs of runs may be a stranger's. The parser
 * recurses for every level, which can end the process (V8 gives up when an expression is compiled at the end of the stack),
 * and needs time in the square of the number of empty items.
 */

const MAX_LEVELS = 100;
const MAX_EMPTY_ITEMS = 100;
const MAX_INDENT = 400;

const INDICATORS = '-?:';
const OPENING = '[{';
const CLOSING = ']}';

/** Why a text cannot be parsed; null if it can. Brackets in quotes count as well: no program writes a hundred in each other. */
export function yamlRefusal(text: string): string | null {
  let [levels, empty, indent, chain] = [0, 0, 0, 0];
  let isIndent = true;
  let last = '';
  for (let i = 0; i < text.length; i++) {
    const character = text[i];
    if (character === '\n') {
      [indent, chain, isIndent] = [0, 0, true];
      continue;
    }
    if (character === ' ' || character === '\t' || character === '\r') {
      if (isIndent) indent += 1;
      continue;
    }
    isIndent = false;
    // Indicators on one line open a level each: "- - - a".
    const isIndicator = INDICATORS.includes(character) && /[\s]|^$/.test(text[i + 1] ?? '');
    chain = isIndicator ? chain + 1 : 0;
    if (OPENING.includes(character)) levels += 1;
    else if (CLOSING.includes(character)) levels = Math.max(0, levels - 1);
    else if (character === ',' && last === ',') empty += 1;
    if (levels > MAX_LEVELS || chain > MAX_LEVELS || indent > MAX_INDENT) return 'is nested too deeply';
    if (empty > MAX_EMPTY_ITEMS) return 'has too many empty items';
    last = character;
  }
  return null;
}
