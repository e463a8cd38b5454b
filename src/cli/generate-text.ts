/** A model's text on a terminal. */

/** Control characters as their pictures: a model's text must not steer the terminal. */
export function visible(text: string): string {
  return text.replace(/[^\P{Cc}\n\t]/gu, (control) => {
    const code = control.charCodeAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : '\u2421';
  });
}
