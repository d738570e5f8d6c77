//! The driver API's table (`api/functions.txt`) and its C types (`api/types.txt`).

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::Path;

/// A line that does not say what its format asks for.
#[derive(Debug)]
pub(crate) struct TableError {
    pub(crate) file: &'static str,
    pub(crate) line: usize,
    pub(crate) what: String,
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

impl std::error::Error for TableError {}

/// Which default stream a NULL stream means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Plain,
    Ptds,
    Ptsz,
}

impl Stream {
    fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Ptds => "_ptds",
            Self::Ptsz => "_ptsz",
        }
    }
}

/// What a call costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Local,
    Post,
    Call,
    Custom,
    Unsupported,
    Data,
}

impl Class {
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "local" => Self::Local,
            "post" => Self::Post,
            "call" => Self::Call,
            "custom" => Self::Custom,
            "unsupported" => Self::Unsupported,
            "data" => Self::Data,
            _ => return None,
        })
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Post => "post",
            Self::Call => "call",
            Self::Custom => "custom",
            Self::Unsupported => "unsupported",
            Self::Data => "data",
        }
    }
}

/// What is checked before an implementation runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    None,
    Init,
    Healthy,
}

impl Gate {
    pub(crate) fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "none" => Self::None,
            "init" => Self::Init,
            "healthy" => Self::Healthy,
            _ => return None,
        })
    }

    pub(crate) fn variant(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Init => "Init",
            Self::Healthy => "Healthy",
        }
    }
}

/// One argument, its C type split from its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arg {
    pub(crate) out: bool,
    pub(crate) c_type: String,
    pub(crate) name: String,
}

/// One exported symbol.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) id: u32,
    pub(crate) symbol: String,
    pub(crate) base: String,
    /// None: not to be had from cuGetProcAddress.
    pub(crate) version: Option<u32>,
    pub(crate) stream: Stream,
    pub(crate) class: Class,
    pub(crate) gate: Gate,
    pub(crate) module: String,
    pub(crate) args: Vec<Arg>,
    /// The type of a data symbol.
    pub(crate) data: String,
}

impl Function {
    /// The symbol whose implementation this one shares: itself without its stream suffix.
    pub(crate) fn implementation(&self) -> &str {
        self.symbol.strip_suffix(self.stream.suffix()).unwrap_or(&self.symbol)
    }
}

pub(crate) const FUNCTIONS: &str = "api/functions.txt";
const TYPES: &str = "api/types.txt";

/// Columns of a row.
pub(crate) const COLUMNS: usize = 9;

/// Reads the table under `root`.
pub(crate) fn load(root: &Path) -> Result<Vec<Function>, Box<dyn std::error::Error>> {
    Ok(parse(&fs::read_to_string(root.join(FUNCTIONS))?)?)
}

fn parse(text: &str) -> Result<Vec<Function>, TableError> {
    let mut functions: Vec<Function> = Vec::new();
    for (number, line) in content(text) {
        let function = row(line, &functions).map_err(|what| TableError {
            file: FUNCTIONS,
            line: number,
            what,
        })?;
        functions.push(function);
    }
    Ok(functions)
}

/// The lines that are neither blank nor comments, numbered from 1.
fn content(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
}

fn row(line: &str, before: &[Function]) -> Result<Function, String> {
    let columns: Vec<&str> = line.splitn(COLUMNS, '|').map(str::trim).collect();
    let &[id, symbol, base, version, stream, class, gate, module, args] = columns.as_slice() else {
        return Err(format!("{} columns where {COLUMNS} are needed", columns.len()));
    };
    let id = id.parse().map_err(|_| format!("id `{id}` is not a number"))?;
    if let Some(twin) = before.iter().find(|f| f.id == id || f.symbol == symbol) {
        return Err(format!("`{symbol}` repeats the id or name of `{}`", twin.symbol));
    }
    let version = match version {
        "-" => None,
        v => Some(v.parse().map_err(|_| format!("version `{v}` is not a number"))?),
    };
    let stream = match stream {
        "plain" => Stream::Plain,
        "ptds" => Stream::Ptds,
        "ptsz" => Stream::Ptsz,
        other => return Err(format!("stream `{other}` is not plain, ptds or ptsz")),
    };
    let mut function = Function {
        id,
        symbol: symbol.to_owned(),
        base: base.to_owned(),
        version,
        stream,
        class: Class::Unsupported,
        gate: Gate::None,
        module: String::new(),
        args: Vec::new(),
        data: String::new(),
    };
    if class == "same" {
        let name = function.implementation();
        let plain = before.iter().find(|f| f.symbol == name);
        let plain = plain.ok_or_else(|| format!("no row for `{name}` stands before this one"))?;
        (function.class, function.gate) = (plain.class, plain.gate);
        function.module.clone_from(&plain.module);
    } else {
        function.class = Class::parse(class).ok_or_else(|| format!("no such class: `{class}`"))?;
        function.gate = Gate::parse(gate).ok_or_else(|| format!("no such gate: `{gate}`"))?;
        function.module = module.to_owned();
    }
    if function.class == Class::Data {
        function.data = args.to_owned();
    } else if args != "void" {
        function.args = args.split(',').map(|a| argument(a.trim())).collect::<Result<_, _>>()?;
    }
    Ok(function)
}

/// `out size_t *bytes`
fn argument(text: &str) -> Result<Arg, String> {
    let bad = || format!("`{text}` is not `in|out C-TYPE NAME`");
    let (direction, rest) = text.split_once(' ').ok_or_else(bad)?;
    let out = match direction {
        "in" => false,
        "out" => true,
        _ => return Err(bad()),
    };
    let split = rest.rfind([' ', '*']).ok_or_else(bad)? + 1;
    let (c_type, name) = rest.split_at(split);
    Ok(Arg { out, c_type: c_type.trim().to_owned(), name: name.to_owned() })
}

/// C types by their Rust names.
#[derive(Debug)]
pub(crate) struct Types(HashMap<String, String>);

impl Types {
    pub(crate) fn load(root: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        let mut types = HashMap::new();
        for (line, entry) in content(&fs::read_to_string(root.join(TYPES))?) {
            let what = || format!("`{entry}` is not `C-TYPE = RUST-TYPE`");
            let (c, rust) = entry.split_once(" = ").ok_or_else(|| TableError {
                file: TYPES,
                line,
                what: what(),
            })?;
            types.insert(c.to_owned(), rust.to_owned());
        }
        Ok(Self(types))
    }

    /// The Rust type of `c_type`, and whether the implementation chooses what it points to.
    pub(crate) fn rust(&self, c_type: &str) -> Result<(String, bool), String> {
        let (constant, rest) = match c_type.strip_prefix("const ") {
            Some(rest) => (true, rest),
            None => (false, c_type),
        };
        let base = rest.trim_end_matches('*').trim();
        let stars = rest.matches('*').count();
        let (mut rust, opaque) = match self.0.get(base) {
            // What a `void *` points to, the implementation knows.
            Some(rust) => (rust.clone(), base == "void" && stars == 1),
            None if stars > 0 => ("c_void".to_owned(), true),
            None => return Err(format!("type `{base}` is passed by value and not in {TYPES}")),
        };
        for level in 0..stars {
            let kind = if level == 0 && constant { "const" } else { "mut" };
            rust = format!("*{kind} {rust}");
        }
        Ok((rust, opaque))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = "0001 | cuMemAlloc_v2 | cuMemAlloc | 3020 | plain | post | healthy | memory | out CUdeviceptr *dptr, in size_t bytesize";

    #[test]
    fn reads_a_row() {
        let table = parse(ROW).unwrap();
        assert_eq!(table[0].version, Some(3020));
        assert_eq!(table[0].gate, Gate::Healthy);
        assert_eq!(
            table[0].args[0],
            Arg { out: true, c_type: "CUdeviceptr *".into(), name: "dptr".into() }
        );
        assert_eq!(
            table[0].args[1],
            Arg { out: false, c_type: "size_t".into(), name: "bytesize".into() }
        );
    }

    #[test]
    fn a_variant_takes_its_plain_symbols_class() {
        let text = format!(
            "{ROW}\n0002 | cuMemAlloc_v2_ptds | cuMemAlloc | 7000 | ptds | same | same | same | void"
        );
        let table = parse(&text).unwrap();
        assert_eq!((table[1].class, table[1].module.as_str()), (Class::Post, "memory"));
        assert_eq!(table[1].implementation(), "cuMemAlloc_v2");
    }

    #[test]
    fn errors_name_the_line() {
        let error = parse(&format!("# comment\n\n{ROW}\n0002 | x | y")).unwrap_err();
        assert_eq!(error.to_string(), "api/functions.txt:4: 3 columns where 9 are needed");
        let error = parse(&format!("{ROW}\n{ROW}")).unwrap_err();
        assert_eq!(error.line, 2);
        let error = parse(&ROW.replace("post", "free")).unwrap_err();
        assert!(error.what.contains("free"));
    }

    #[test]
    fn the_table_itself() {
        let table = load(&crate::root()).unwrap();
        assert_eq!(table.len(), 707, "what driver 580 exports");
        assert!((1..).zip(&table).all(|(id, f)| f.id == id));
        // A symbol is its base name with a version and a default stream behind it.
        for f in &table {
            let rest = f.implementation().strip_prefix(&f.base).unwrap();
            assert!(rest.is_empty() || rest.starts_with("_v"), "{}", f.symbol);
        }
        // cuGetProcAddress must not have to choose between two of one version.
        for a in &table {
            let twin = |b: &&Function| {
                b.id != a.id
                    && b.base == a.base
                    && b.version == a.version
                    && (b.stream == Stream::Plain) == (a.stream == Stream::Plain)
            };
            assert!(a.version.is_none() || table.iter().find(twin).is_none(), "{}", a.symbol);
        }
    }

    #[test]
    fn maps_types() {
        let types = Types(HashMap::from([
            ("char".to_owned(), "c_char".to_owned()),
            ("size_t".to_owned(), "usize".to_owned()),
        ]));
        assert_eq!(types.rust("const char **").unwrap(), ("*mut *const c_char".into(), false));
        assert_eq!(types.rust("size_t *").unwrap(), ("*mut usize".into(), false));
        assert_eq!(types.rust("const CUDA_MEMCPY2D_v2 *").unwrap(), ("*const c_void".into(), true));
        assert!(types.rust("CUDA_MEMCPY2D_v2").is_err());
    }
}
