//! The fuzz target's body over the committed corpus, with mutations.

use kedge_pmi::check_bytes;
use proptest::prelude::*;

fn seeds() -> Vec<Vec<u8>> {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/pmi");
    let files = std::fs::read_dir(corpus).expect("the corpus");
    let seeds: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(seeds.len() >= 4);
    seeds
}

#[test]
fn every_bit_of_every_message() {
    for seed in seeds() {
        check_bytes(&seed);
        for at in 0..seed.len() * 8 {
            let mut bytes = seed.clone();
            bytes[at / 8] ^= 1 << (at % 8);
            check_bytes(&bytes);
            check_bytes(&seed[..at / 8]);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        check_bytes(&bytes);
    }

    #[test]
    fn any_text(text in "(cmd=[a-z-]{1,8}[; ])?([a-z]{0,3}[=; \n]{0,2}){0,9}") {
        check_bytes(text.as_bytes());
        check_bytes(format!("{:6}{text}", text.len()).as_bytes());
    }
}
