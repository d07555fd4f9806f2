// Makes elements from plain values. Strings only become text, so a server's strings never become markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export const html = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Show a message, or hide it if `text` is empty. */
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}
