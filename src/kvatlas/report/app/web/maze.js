/* The maze of a problem, drawn from the facts of its question, with plans as walks through its rooms. */
const ROOM = 30;

function spotOf(room) {
  const [, letters, row] = room.match(/^([A-Z]+)(\d+)$/);
  return [[...letters].reduce((column, letter) => 26 * column + letter.charCodeAt(0) - 64, 0), Number(row)];
}

/* `plans` are pairs of a name and a text; null for a question that is no maze. */
function mazeOf(question, plans) {
  const facts = (pattern) => [...(question ?? "").matchAll(pattern)].map((match) => match.slice(1));
  const open = facts(/Room ([A-Z]+\d+) and ([A-Z]+\d+) are connected by an open door/g);
  const locked = facts(/door between ([A-Z]+\d+) and ([A-Z]+\d+) requires key (\d+)/gi);
  const keys = facts(/Key (\d+) is in room ([A-Z]+\d+)/g), people = facts(/(Bob|Alice) is in room ([A-Z]+\d+)/g);
  const rooms = unique([...open, ...locked].flatMap(([a, b]) => [a, b])), spots = rooms.map(spotOf);
  if (people.length < 2 || people.some(([, room]) => !rooms.includes(room))) return null;
  const ends = [0, 1].map((axis) => spots.map((spot) => spot[axis])).map((places) => [Math.min(...places), Math.max(...places)]);
  const at = (room) => spotOf(room).map((place, axis) => (place - ends[axis][0] + 0.5) * ROOM);
  const text = (x, y, word) => svg("text", { x, y: y + 4, "text-anchor": "middle" }, word);
  const door = ([a, b, key]) => {
    const [[x1, y1], [x2, y2]] = [at(a), at(b)];
    return [svg("line", { class: key ? "door locked" : "door", x1, y1, x2, y2 }), ...(key ? [text((x1 + x2) / 2, (y1 + y2) / 2, key)] : [])];
  };
  const floor = (room) => {
    const [x, y] = at(room);
    return svg("rect", { class: "floor", x: x - 10, y: y - 10, width: 20, height: 20, rx: 3 }, svg("title", {}, room));
  };
  const walk = ([name, plan]) => {
    const walked = [...plan.matchAll(/'(?:start|move_to)', '([A-Z]+\d+)'/g)].map(([, room]) => room).filter((room) => rooms.includes(room));
    return svg("polyline", { class: `walk ${name}`, points: walked.map((room) => at(room).join()).join(" ") });
  };
  const there = plans.filter(([, plan]) => plan), names = { reference: "grey: the shortest plan", answer: "blue: this answer" };
  const words = ["B: Bob, A: Alice", ...(locked.length ? ["orange: locked doors with their keys"] : []), ...there.map(([name]) => names[name])];
  const size = ends.map(([low, high]) => (high - low + 1) * ROOM);
  return el("figure", { class: "maze" },
    svg("svg", { viewBox: `0 0 ${size.join(" ")}`, role: "img", "aria-label": "The maze of the problem" },
      ...rooms.map(floor), ...[...open, ...locked].flatMap(door), ...there.map(walk),
      ...keys.filter(([, room]) => rooms.includes(room)).map(([key, room]) => text(at(room)[0] + 5, at(room)[1] + 4, key)),
      ...people.map(([name, room]) => text(at(room)[0] - 4, at(room)[1] - 3, name[0]))),
    el("figcaption", {}, `${words.join("; ")}.`));
}
