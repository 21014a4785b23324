// Elements made of text, never of HTML: what names and messages hold is shown as it is.

// The children are elements, strings, or nothing.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ''));
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Sets text only where it changed: a selection, and what a screen reader reads, stay.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

export function setClass(node, name, on) {
  if (node.classList.contains(name) !== on) node.classList.toggle(name, on);
}

// A bar of a share between 0 and 1: a picture of a number that stands beside it as text.
export function meter(share, kind = '') {
  const fill = element('span', {class: `fill ${kind}`});
  fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return element('span', {class: 'meter', 'aria-hidden': 'true'}, fill);
}

// A table that changes in place. A column has a title, `text(row)`, or `cell(row)` for more than text with `key(row)`,
// which changes when the cell does. `heading`: it names the row.
export class LiveTable {
  constructor(columns, {caption, rowKey, rowClass = () => ''}) {
    this.columns = columns;
    this.rowKey = rowKey;
    this.rowClass = rowClass;
    this.rows = new Map();
    this.body = element('tbody');
    this.caption = element('caption', {class: 'unseen'}, caption);
    const titles = columns.map((column) =>
      element('th', {scope: 'col', class: column.number ? 'number' : null, title: column.hint}, column.title));
    this.table = element('table', {}, this.caption, element('thead', {}, element('tr', {}, ...titles)), this.body);
    // Tables may be wider than a phone: they scroll by themselves, also by keyboard.
    this.room = element('div', {class: 'scrolls', tabindex: '0', role: 'group', 'aria-label': `${caption}: a table that scrolls`}, this.table);
  }

  show(values) {
    const kept = new Map();
    values.forEach((value, index) => {
      const key = this.rowKey(value);
      const row = this.rows.get(key) || this.newRow();
      this.fill(row, value);
      kept.set(key, row);
      if (this.body.children[index] !== row.node) this.body.insertBefore(row.node, this.body.children[index] || null);
    });
    for (const [key, row] of this.rows) if (!kept.has(key)) row.node.remove();
    this.rows = kept;
  }

  newRow() {
    const cells = this.columns.map((column) =>
      element(column.heading ? 'th' : 'td', {scope: column.heading ? 'row' : null, class: column.number ? 'number' : null}));
    return {node: element('tr', {}, ...cells), cells, keys: []};
  }

  fill(row, value) {
    const name = this.rowClass(value);
    if (row.node.className !== name) row.node.className = name;
    this.columns.forEach((column, i) => {
      if (!column.cell) {
        setText(row.cells[i], column.text(value));
        return;
      }
      const key = column.key(value);
      if (row.keys[i] === key) return;
      row.keys[i] = key;
      row.cells[i].replaceChildren(...[column.cell(value)].flat().filter((child) => child !== null && child !== ''));
    });
  }
}
