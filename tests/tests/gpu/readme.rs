use kedge_tests::place::Place;

#[test]
fn a_job_goes_on_where_its_image_was_taken() {
    let place = Place::mine("goeson");
    let mut job = place.with_device("gpu_steps", &[], &["100"]);
    job.read_to(5);
    let image = place.checkpoint(&[]);
    job.read_to(job.step + 2);
    job.kill();
    let again = place.restart(&image, &job.nonce);
    assert_eq!(again.finish(100).code(), Some(7));
}
