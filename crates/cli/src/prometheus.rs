//! Figures in Prometheus' text format.

use std::fmt::Write as _;

/// Labels of one value, and the value.
pub(crate) type Sample = (Vec<(&'static str, String)>, f64);

/// One figure: its name, kind and meaning, and its values.
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: Vec<Sample>,
}

/// All figures of one moment.
#[derive(Default)]
pub(crate) struct Figures(Vec<Family>);

impl Figures {
    /// Adds a value of the figure `name`, of a `kind` (gauge or counter) and with a meaning.
    pub(crate) fn add(
        &mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
        sample: Sample,
    ) {
        match self.0.iter_mut().find(|family| family.name == name) {
            Some(family) => family.samples.push(sample),
            None => self.0.push(Family { name, kind, help, samples: vec![sample] }),
        }
    }

    /// The text format, version 0.0.4.
    pub(crate) fn render(&self) -> String {
        let mut text = String::new();
        for family in &self.0 {
            let Family { name, kind, help, samples } = family;
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let labels = labels.iter().map(|(name, value)| {
                    let value = value.replace('\\', r"\\").replace('"', "\\\"");
                    format!("{name}=\"{}\"", value.replace('\n', r"\n"))
                });
                let labels = labels.collect::<Vec<_>>().join(",");
                let _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_s_values_stand_together_and_labels_are_quoted() {
        let mut figures = Figures::default();
        figures.add("a", "gauge", "A.", (vec![("x", "1\"\\\n".into())], 1.5));
        figures.add("b", "counter", "B.", (vec![], 2.0));
        figures.add("a", "gauge", "A.", (vec![("x", "2".into()), ("y", "3".into())], 1e12));
        let text = figures.render();
        let want = "# HELP a A.\n# TYPE a gauge\na{x=\"1\\\"\\\\\\n\"} 1.5\n\
                    a{x=\"2\",y=\"3\"} 1000000000000\n# HELP b B.\n# TYPE b counter\nb{} 2\n";
        assert_eq!(text, want);
    }
}
