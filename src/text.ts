/** Text for people: shell quoting, wrapping, control characters. */

/** Quotes an argument for a POSIX shell, so that a printed command can be pasted; plain words stay as they are. */
export function shellQuote(argument: string): string {
  return /^[\w@%+=:,./-]+$/.test(argument) ? argument : `'${argument.replaceAll("'", `'\\''`)}'`;
}

/** Lines of at most `width` characters, broken between words; a word longer than a line is cut. */
export function wrapText(text: string, width: number): string[] {
  const lines: string[] = [];
  let line = '';
  for (let word of text.split(' ')) {
    if (line !== '' && line.length + 1 + word.length > width) {
      lines.push(line);
      line = '';
    }
    for (; word.length > width; word = word.slice(width)) lines.push(word.slice(0, width));
    line = line === '' ? word : `${line} ${word}`;
  }
  return [...lines, line];
}

/** Replaces control characters other than newline and tab by their pictures (␛), so that they cannot steer a terminal. */
export function visible(text: string): string {
  return text.replace(/[^\P{Cc}\n\t]/gu, (control) => {
    const code = control.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : '\u2421';
  });
}

/** `1 thread`, `2 threads` */
export function plural(count: number, noun: string): string {
  return `${count} ${count === 1 ? noun : `${noun}s`}`;
}
